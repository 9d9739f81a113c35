"""How far the weights of a type may be from those it was made of: what the limits of codecs.py mean.

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

import numpy as np
import numpy.typing as npt

LEAST_MEAN = 0.65
"""Least mean magnitude in an ordinary row, in units of the root mean square. Normal weights have 0.80,
Laplace's 0.71, weights of one size 1; one outlier or many zeros bring it near 0."""


def is_ordinary(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Return which of `rows`, (n_rows, n_cols), are spread so that the limits hold, (n_rows,); zeros are."""
    return np.abs(rows).mean(axis=1) >= LEAST_MEAN * np.sqrt((rows**2).mean(axis=1))
