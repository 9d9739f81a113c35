"""The project's own methods: rounding with feedback, under the inputs alone or the outputs' gradients too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats.base import Bytes
from quantize.rounding.base import DEFAULT
from quantize.rounding.factor import Factor
from quantize.rounding.feedback import encode_compensated
from quantize.rounding.methods.base import Matrix, Method, Rates
from quantize.rounding.rounders import can_compensate, rounds_in_groups
from quantize.rounding.two_sided import encode_side_by_side

_VERSION = 6


def _encode_one_sided(matrices: Sequence[Matrix], type_: GGMLType, factor: Factor) -> list[Bytes]:
    return [encode_compensated(each.rows, type_, factor, DEFAULT) for each in matrices]


def _encode_two_sided(matrices: Sequence[Matrix], type_: GGMLType, factor: Factor) -> list[Bytes]:
    """Encode matrices side by side; from one side where the gradients of one of them are not known."""
    sides = [(each.rows, each.outputs) for each in matrices if each.outputs is not None]
    if len(sides) < len(matrices):
        return _encode_one_sided(matrices, type_, factor)
    return encode_side_by_side(sides, type_, factor, DEFAULT)


def _rates(scalar: Rates, grid: Rates) -> Callable[[GGMLType], Rates]:
    """Return the rates of types whose weights stand alone, and of types with grids."""
    return lambda type_: grid if rounds_in_groups(type_) else scalar


# Rates were measured on an AMD EPYC with AVX-512, one core.
ONE_SIDED = Method(
    name="one-sided",
    version=_VERSION,
    can_encode=can_compensate,
    encode=_encode_one_sided,
    rates=_rates(Rates(0.13, 5e-5), Rates(0.73, 2.5e-5)),
    settings={"effort": asdict(DEFAULT)},
)
"""Errors of a column are made up for in later columns of the row, under the second moments of the inputs."""

TWO_SIDED = replace(
    ONE_SIDED,
    name="two-sided",
    encode=_encode_two_sided,
    rates=_rates(Rates(0.20, 1e-4), Rates(0.86, 1e-4)),
    needs_gradients=True,
)
"""The same, and errors of a row are made up for in later rows, under the covariance of the gradients."""
