"""Rows and importances that a codec can meet, from the everyday to the extreme.

All are finite: a NaN or an infinity in a weight is refused before it reaches a codec.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Sample = Callable[[np.random.Generator, tuple[int, int]], npt.NDArray]


def _sparse(rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray:
    return np.where(rng.random(shape) < 0.95, 0.0, rng.standard_normal(shape))


def _constant(_rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray:
    """Rows of one value each, of both signs."""
    return np.broadcast_to(0.37 * (-1.0) ** np.arange(shape[0])[:, None], shape)


def _zero(_rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray:
    """Rows of 0 and rows of -0."""
    return np.broadcast_to(np.array([0.0, -0.0])[np.arange(shape[0]) % 2, None], shape)


def _single_outlier(rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray:
    rows = rng.standard_normal(shape) * 1e-3
    rows[:, rng.integers(shape[1])] = 50 * (-1.0) ** np.arange(shape[0])
    return rows


def _ties(rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray:
    """Small integers, for equal magnitudes and quotients that end in exactly a half."""
    return rng.integers(-8, 9, shape)


def _mixed_scales(rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray:
    """Groups of 16 columns, each with its own scale, some of them zero, for the scales of a super-block."""
    scales = rng.choice([0, 1e-20, 1e-8, 1e-3, 1, 30], (shape[0], -(-shape[1] // 16)))
    return rng.standard_normal(shape) * np.repeat(scales, 16, axis=1)[:, : shape[1]]


ROWS: dict[str, Sample] = {
    "normal": lambda rng, shape: rng.standard_normal(shape) * 0.02,
    "heavy_tailed": lambda rng, shape: rng.standard_t(2, shape) * 0.02,
    "sparse": _sparse,
    "constant": _constant,
    "zero": _zero,
    "single_outlier": _single_outlier,
    "positive": lambda rng, shape: 1 + rng.random(shape),
    "negative": lambda rng, shape: -1 - rng.random(shape),
    "ties": _ties,
    "mixed_scales": _mixed_scales,
    "denormal": lambda rng, shape: rng.standard_normal(shape) * 1e-40,
    "least_normal": lambda rng, shape: rng.standard_normal(shape) * 3e-38,
    "counts_as_zero": lambda rng, shape: rng.standard_normal(shape) * 1e-15,
    "half_underflow": lambda rng, shape: rng.standard_normal(shape) * 1e-6,
    "half_overflow": lambda rng, shape: rng.standard_normal(shape) * 1e6,
    "very_large": lambda rng, shape: rng.standard_normal(shape) * 1e20,
    "largest": lambda rng, shape: rng.uniform(-3.4e38, 3.4e38, shape),
}

TOO_LARGE = ("half_overflow", "very_large", "largest")
"""Kinds of rows that types refuse, because scales or, with a grid, squares overflow."""

IMPORTANCES: dict[str, Sample] = {
    "random": lambda rng, shape: rng.gamma(0.5, 2, shape),
    "sparse": lambda rng, shape: np.where(rng.random(shape) < 0.8, 0, rng.random(shape)),
    "zero": lambda _rng, shape: np.zeros(shape),
    "wide": lambda rng, shape: 10 ** rng.uniform(-30, 12, shape),
}


def rows(kind: str, shape: tuple[int, int], seed: int = 0) -> Floats:
    """Return float32 rows of `shape` (n_rows, n_cols)."""
    return np.ascontiguousarray(ROWS[kind](np.random.default_rng(seed), shape), np.float32)


def importances(kind: str | None, n_cols: int, seed: int = 1) -> Floats | None:
    """Return float32 (n_cols,), or None for no importances."""
    if kind is None:
        return None
    return np.ascontiguousarray(IMPORTANCES[kind](np.random.default_rng(seed), (1, n_cols))[0], np.float32)
