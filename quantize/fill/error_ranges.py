"""How far the weights of a type may be from those it was made of.

The relative error of rows is sqrt(sum w (x - q)^2 / sum w x^2), w the importance of the column, or 1. A limit
is about twice the largest that generated rows have: normal, Laplace's, uniform, of Student's t, of one sign,
of one size, with zeros among them, without importances and with several kinds of them; and at most 1, which
is what zeros would give. (Only IQ1_M is allowed more: without importances it does worse than zeros to ternary
weights.) Every matrix of the trained model in tests/golden stays below two thirds of its limit, or below 85%
for the ternary types; tests/quantize/fill/test_error_ranges.py measures all this anew.

Such limits hold for rows that are spread like trained ones. Where a few weights are much larger than all the
others, a type whose grid has no zero (most IQ types) makes the others larger than they were, in ggml as here:
with one outlier of 50 among weights of 0.001, IQ2_XXS gives 180%. `is_ordinary` tells such rows apart.

Scales are float16 in most types. Below 2**-14 their spacing no longer shrinks with them, so an absolute error
goes on top of the relative one: half that spacing times the largest multiple of the scale that a weight is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

_HALF_STEP = 2.0**-25  # half the spacing of float16 below 2**-14

LEAST_MEAN = 0.65
"""Of the magnitudes in an ordinary row, in units of their root mean square: 0.80 for normal weights, 0.71 for
Laplace's, 1 for weights of one size, near 0 for one outlier or for many zeros."""


@dataclass(frozen=True)
class ErrorRange:
    """What a type may do to weights.

    relative  limit of the relative error of ordinary rows
    absolute  what is allowed of each weight besides, because small scales are coarse
    """

    relative: float
    absolute: float


def _halves(relative: float, multiple: float) -> ErrorRange:
    """Return the range of a type with float16 scales; a weight is at most `multiple` times one of them."""
    return ErrorRange(relative, multiple * _HALF_STEP)


ERROR_RANGES: Mapping[str, ErrorRange] = MappingProxyType(
    {
        "F32": ErrorRange(0.0, 0.0),
        "F16": ErrorRange(2.0**-11, _HALF_STEP),
        "BF16": ErrorRange(2.0**-8, 2.0**-134),
        "Q4_0": _halves(0.24, 8),
        "Q4_1": _halves(0.21, 15 + 1),
        "Q5_0": _halves(0.12, 16),
        "Q5_1": _halves(0.11, 31 + 1),
        "Q8_0": _halves(0.015, 127),
        "Q2_K": _halves(1.00, 15 * 3 + 15),
        "Q3_K": _halves(0.38, 32 * 4),
        "Q4_K": _halves(0.22, 63 * 15 + 63),
        "Q5_K": _halves(0.10, 63 * 31 + 63),
        "Q6_K": _halves(0.05, 128 * 32),
        "Q8_K": ErrorRange(0.025, 2.0**-120),
        "IQ1_S": _halves(1.00, 15 * 1.125),
        "IQ1_M": _halves(1.50, 15 * 1.125),
        "IQ2_XXS": _halves(0.71, 15.5 * 43 / 4),
        "IQ2_XS": _halves(0.60, 15.5 * 43 / 4),
        "IQ2_S": _halves(0.68, 15.5 * 43 / 4),
        "IQ3_XXS": _halves(0.64, 15.5 * 62 / 2),
        "IQ3_S": _halves(0.40, 31 * 15),
        "IQ4_NL": _halves(0.19, 127),
        "IQ4_XS": _halves(0.19, 32 * 127),
        "TQ1_0": _halves(1.00, 1),
        "TQ2_0": _halves(1.00, 2),
        "MXFP4": ErrorRange(0.34, 2.0**-120),
        "NVFP4": ErrorRange(0.22, 6 * 2.0**-9),
        "Q1_0": _halves(1.00, 1),
        "Q2_0": _halves(1.00, 2),
    }
)
"""By the type's name: every type with a codec."""


def is_ordinary(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Return which of `rows`, (n_rows, n_cols), are spread so that the limits hold, (n_rows,); zeros are."""
    return np.abs(rows).mean(axis=1) >= LEAST_MEAN * np.sqrt((rows**2).mean(axis=1))
