"""How much of a type's error limit rows use."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.fill.verify import is_ordinary
from quantize.formats.base import QuantFormat
from quantize.formats.codecs import CODECS
from tests.quantize.codecs import decode, encode

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


def share_of_limit(format_: QuantFormat, rows: npt.NDArray, weights: npt.NDArray[np.float32] | None) -> float:
    """Return the relative error of the ordinary ones of `rows`, as a share of the type's limit."""
    limits = CODECS[format_.type.name].error_range
    exact = rows.astype(np.float64)
    kept = is_ordinary(exact)
    decoded = decode(format_.type, encode(format_.type, rows, weights)).astype(np.float64)
    costs = np.ones(rows.shape[1]) if weights is None else weights.astype(np.float64)
    lost = float((costs * (exact - decoded) ** 2)[kept].sum())
    total = float((costs * exact**2)[kept].sum())
    if not lost:
        return 0.0
    return (lost / total) ** 0.5 / limits.relative if limits.relative else np.inf
