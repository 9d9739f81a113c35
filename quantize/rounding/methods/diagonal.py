"""The stock encoder under the mean square of each column, as with an importance matrix of the text.

It rounds each weight by itself. What it gains over an importance matrix is the correction for the drift of
the inputs. It is the fastest method, and what others are measured against.
"""

from __future__ import annotations

from collections.abc import Sequence

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats.base import Bytes
from quantize.formats.codecs import ignores_importances
from quantize.rounding.factor import Factor
from quantize.rounding.judge import encode_stock
from quantize.rounding.methods.base import Matrix, Method, Rates


def _encode(matrices: Sequence[Matrix], type_: GGMLType, factor: Factor) -> list[Bytes]:
    return [encode_stock(each.rows, type_, factor) for each in matrices]


DIAGONAL = Method(
    name="diagonal",
    version=1,
    can_encode=lambda type_: not ignores_importances(type_.name),
    encode=_encode,
    rates=lambda type_: Rates(0.03, 0.0),
)
"""Rates: scripts/bench/kernels.py encodes 30 to 100 million weights a second with importances."""
