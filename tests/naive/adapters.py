"""An adapter merged in the obvious way, from the formulas of PEFT's documentation: in float64, at once."""

from __future__ import annotations

import math

import numpy as np


def merged(
    weight: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    *,
    alpha: float,
    rslora: bool = False,
    magnitude: np.ndarray | None = None,
    n_mats: int = 1,
) -> np.ndarray:
    """Return W + s B A of (outputs, inputs), or of each of a stack of such matrices."""
    rank = len(a) // n_mats
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    a, b = a.astype(np.float64), b.astype(np.float64)
    products = [b[:, mat::n_mats] @ a[mat * rank : (mat + 1) * rank] for mat in range(n_mats)]
    result = weight.astype(np.float64) + scale * np.reshape(products, weight.shape)
    if magnitude is None:
        return result
    return magnitude[:, None] * result / np.linalg.norm(result, axis=1, keepdims=True)
