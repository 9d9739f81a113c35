"""The limits of errors, measured: what codecs do to generated rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from gguf_tools.format.block_layouts import SCALES
from quantize.fill.verify import is_ordinary
from quantize.formats import available, get_format
from quantize.formats.base import QuantFormat
from quantize.formats.codecs import CODECS, ignores_importances, requires_importances
from tests.quantize.codecs import decode
from tests.quantize.fill.error_shares import LARGEST_SHARES, share_of_limit
from tests.support import samples

N_COLS = 1024

Floats = npt.NDArray[np.float64]
Sample = Callable[[np.random.Generator, tuple[int, int]], npt.NDArray]


def _group_scales(rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray:
    return np.repeat(np.exp(0.5 * rng.standard_normal((shape[0], shape[1] // 16))), 16, axis=1)


ORDINARY: dict[str, Sample] = {
    "normal": lambda rng, shape: rng.standard_normal(shape) * 0.02,
    "laplace": lambda rng, shape: rng.laplace(size=shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "student": lambda rng, shape: rng.standard_t(3, shape),
    "positive": lambda rng, shape: 1 + rng.random(shape),
    "negative": lambda rng, shape: -1 - rng.random(shape),
    "one size": lambda rng, shape: rng.choice([-0.3, 0.3], shape),
    "two sizes": lambda rng, shape: rng.choice([1.0, 2.0], shape),
    "integers": lambda rng, shape: rng.integers(-8, 9, shape),
    "constant": lambda _, shape: np.full(shape, 0.37),
    "ramp": lambda _, shape: np.broadcast_to(np.linspace(0, 1, shape[1]), shape),
    "few outliers": lambda rng, shape: np.where(rng.random(shape) < 0.003, 8, 1) * rng.standard_normal(shape),
    "groups": lambda rng, shape: rng.standard_normal(shape) * _group_scales(rng, shape),
    "3 in 10 zeros": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.7),
    "ternary": lambda rng, shape: rng.choice([-1.0, 0, 1], shape),
    "mostly zeros": lambda rng, shape: rng.choice([-1.0, 0, 1], shape, p=(0.225, 0.55, 0.225)),
}


def _massive(rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray:
    """Importances as of channels with massive activations: two columns count a million times as much."""
    values = rng.gamma(0.5, 2, shape)
    values[:, rng.integers(shape[1], size=2)] *= 1e6
    return values


IMPORTANCES = {**samples.IMPORTANCES, "massive": _massive}


def importance_kinds(format_: QuantFormat) -> Iterator[npt.NDArray[np.float32] | None]:
    if not requires_importances(format_.type.name):
        yield None
    if not ignores_importances(format_.type.name):
        for make in IMPORTANCES.values():
            yield np.ascontiguousarray(make(np.random.default_rng(1), (1, N_COLS))[0], np.float32)


@pytest.fixture(scope="module")
def generated() -> dict[str, npt.NDArray[np.float32]]:
    """Rows of every ordinary kind."""
    return {
        kind: np.ascontiguousarray(make(np.random.default_rng(5), (16, N_COLS)), np.float32)
        for kind, make in ORDINARY.items()
    }


@pytest.mark.parametrize("name", available())
def test_generated_rows_use_about_half_of_the_limit(
    name: str, generated: dict[str, npt.NDArray[np.float32]]
) -> None:
    format_ = get_format(name)
    shares = {
        kind: max(share_of_limit(format_, rows, weights) for weights in importance_kinds(format_))
        for kind, rows in generated.items()
    }
    assert max(shares.values()) < LARGEST_SHARES.get(name, 0.67), shares


@pytest.mark.parametrize("kind", ["single_outlier", "sparse", "mixed_scales", "heavy_tailed"])
def test_odd_rows_are_no_measure(kind: str) -> None:
    assert is_ordinary(samples.rows(kind, (64, 2048)).astype(np.float64)).mean() < 0.5


@pytest.mark.parametrize("kind", ["normal", "constant", "zero", "positive", "ties", "denormal"])
def test_ordinary_rows(kind: str) -> None:
    assert is_ordinary(samples.rows(kind, (64, 2048)).astype(np.float64)).all()


def _has_half_scales(name: str) -> bool:
    return name in SCALES and any(field.kind in ("f2", "m8") for field in SCALES[name].block)


@pytest.mark.parametrize("name", [name for name in available() if name != "F16" and _has_half_scales(name)])
def test_the_absolute_error_is_half_the_least_half_times_the_largest_multiple(name: str) -> None:
    """Blocks of any codes, their scales set to 1, decode to at most so many."""
    format_ = get_format(name)
    blocks = np.random.default_rng(0).integers(0, 256, (20000, format_.type.block_bytes), np.uint8)
    one = int(np.float16(1).view(np.uint16))
    for field in SCALES[name].block:
        numbers = blocks[:, field.offset : field.offset + field.item_bytes]
        if field.kind == "m8":
            parts = numbers.view("<u2")
            parts &= 0x0FFF
            parts |= (one >> np.array([0, 4, 8, 12], np.uint16) & 0xF) << 12
        else:
            numbers.view("<u2")[:] = one
    largest = np.abs(decode(name, blocks)).max()
    multiple = CODECS[name].error_range.absolute * 2**25
    # Of d * q - m both roundings count; Q8_0 has a code -128, which is never written.
    assert 0.75 * multiple <= largest <= multiple * (128 / 127 if name == "Q8_0" else 1)
