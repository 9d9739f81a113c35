"""Second moments to test with."""

from __future__ import annotations

import numpy as np

from quantize.rounding.factor import Moments


def correlated(n: int, seed: int = 0, n_inputs: int = 0) -> Moments:
    """Return the moments of inputs whose columns are of different sizes and hang together, float64 (n, n).

    n_inputs  how many inputs there are; 0: four times as many as columns
    """
    rng = np.random.default_rng(seed)
    mixing = np.eye(n) + 0.6 * rng.standard_normal((n, n)) / np.sqrt(n)
    inputs = rng.standard_normal((n_inputs or 4 * n, n)) @ mixing * np.exp(0.5 * rng.standard_normal(n))
    return inputs.T @ inputs


def weights(n_rows: int, n_cols: int, seed: int = 0) -> np.ndarray:
    """Return normal weights of the size that models have, float32."""
    return (np.random.default_rng(seed).standard_normal((n_rows, n_cols)) * 0.02).astype(np.float32)
