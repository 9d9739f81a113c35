"""The limits of errors, measured: what codecs do to generated rows and to those of the trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import imatrix
from convert.checkpoint.checkpoint import Checkpoint
from convert.pipeline import ConvertOptions, prepare
from gguf_tools.scales import SCALES
from quantize.fill.error_ranges import ERROR_RANGES, is_ordinary
from quantize.formats import available, get_format
from quantize.formats.base import ImportanceUse, QuantFormat, Weights
from tests.support import samples
from tests.support.tokenizer_files import copy_tokenizer

GOLDEN = Path(__file__).parents[2] / "golden"
N_COLS = 1024

LARGEST_SHARES = {
    "IQ1_M": 0.9,
    "F16": 1.01,
    "BF16": 1.01,
    "TQ1_0": 0.85,
    "TQ2_0": 0.85,
    "Q2_0": 0.8,
    "Q1_0": 0.8,
}
"""Of the limit, where it is what rounding can do at most, or where 1 is near what the type does."""

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


def importance_kinds(format_: QuantFormat) -> Iterator[Weights]:
    if format_.importance is not ImportanceUse.REQUIRED:
        yield None
    if format_.importance is not ImportanceUse.IGNORED:
        for make in IMPORTANCES.values():
            yield np.ascontiguousarray(make(np.random.default_rng(1), (1, N_COLS))[0], np.float32)


def share_of_limit(format_: QuantFormat, rows: npt.NDArray, weights: Weights) -> float:
    """Return the relative error of the ordinary ones of `rows`, as a share of the type's limit."""
    limits = ERROR_RANGES[format_.type.name]
    exact = rows.astype(np.float64)
    kept = is_ordinary(exact)
    decoded = format_.dequantize(format_.quantize(rows, weights)).astype(np.float64)
    costs = np.ones(rows.shape[1]) if weights is None else weights.astype(np.float64)
    lost = float((costs * (exact - decoded) ** 2)[kept].sum())
    total = float((costs * exact**2)[kept].sum())
    if not lost:
        return 0.0
    return (lost / total) ** 0.5 / limits.relative if limits.relative else np.inf


@pytest.fixture(scope="module")
def generated() -> dict[str, npt.NDArray[np.float32]]:
    """Rows of every ordinary kind."""
    return {
        kind: np.ascontiguousarray(make(np.random.default_rng(5), (16, N_COLS)), np.float32)
        for kind, make in ORDINARY.items()
    }


def test_every_type_has_a_range() -> None:
    assert set(ERROR_RANGES) == set(available())


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
    return name in SCALES and SCALES[name].block[0][0] in "em"


@pytest.mark.parametrize("name", [name for name in available() if name != "F16" and _has_half_scales(name)])
def test_the_absolute_error_is_half_the_least_half_times_the_largest_multiple(name: str) -> None:
    """Blocks of any codes, their scales set to 1, decode to at most so many."""
    format_ = get_format(name)
    blocks = np.random.default_rng(0).integers(0, 256, (20000, format_.BLOCK.itemsize), np.uint8)
    one = int(np.float16(1).view(np.uint16))
    for code, offset in SCALES[name].block:
        if code == "m":
            parts = blocks[:, offset : offset + 8].view("<u2")
            parts &= 0x0FFF
            parts |= (one >> np.array([0, 4, 8, 12], np.uint16) & 0xF) << 12
        else:
            blocks[:, offset : offset + 2].view("<u2")[:] = one
    largest = np.abs(format_.dequantize(blocks.view(format_.BLOCK))).max()
    multiple = ERROR_RANGES[name].absolute * 2**25
    # Of d * q - m both roundings count; Q8_0 has a code -128, which is never written.
    assert 0.75 * multiple <= largest <= multiple * (128 / 127 if name == "Q8_0" else 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[npt.NDArray, Weights]]:
    """Some rows of every matrix of the trained model whose rows fit every type, with their importances."""
    folder = copy_tokenizer("tiny", tmp_path_factory.mktemp("trained"))
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(GOLDEN / "tiny-deepseek-v3" / name)
    data = imatrix.load(GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf")
    with Checkpoint(folder) as checkpoint:
        _, job = prepare(checkpoint, None, ConvertOptions(outtype="Q2_K", importances=data))
        matrices = []
        for name, found in job.importances.items():
            source = job.sources[name]
            if source.shape[-1] % 256 == 0:
                step = min(found.rows_per_weights, 64)
                for start in (0, found.rows_per_weights * (found.matrix.shape[0] - 1)):
                    rows = source.read_rows(start, start + step).astype(np.float32)
                    matrices.append((rows, found.weights_of_row(start)))
    return matrices


@pytest.mark.parametrize("name", available())
def test_trained_rows_stay_well_inside(name: str, trained: list[tuple[npt.NDArray, Weights]]) -> None:
    format_ = get_format(name)
    assert len(trained) > 50
    assert np.mean([is_ordinary(rows.astype(np.float64)).mean() for rows, _ in trained]) > 0.99
    shares = []
    for rows, weights in trained:
        if format_.importance is not ImportanceUse.REQUIRED:
            shares.append(share_of_limit(format_, rows, None))
        if format_.importance is not ImportanceUse.IGNORED:
            shares.append(share_of_limit(format_, rows, weights))
    assert max(shares) < LARGEST_SHARES.get(name, 0.67)
