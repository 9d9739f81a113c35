"""Weightings: how much an error in a weight costs, as an encoder's search is told.

Today that is a weight for each column. Second moments, by which errors of two columns count together, can
join as a second class: `Weighting` becomes the union of both, and a codec says which it takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_LARGEST = 2.0**40
"""Importance above which searches are not trusted with it: they multiply up to three sums of importances, in
float32. Activations that fit float16 have none above 2**32."""

_USUAL_EXPONENT = 20
"""Exponent of the largest importance, where it was above `_LARGEST`."""


@dataclass(frozen=True, eq=False)
class ColumnWeights:
    """The cost of an error (x - q)**2 in each column.

    values  float32 (n_cols,)
    """

    values: npt.NDArray[np.float32]

    def in_range(self) -> ColumnWeights:
        """Return weights that a search can multiply: these, or where one is too large, all of them smaller.

        The factor is a power of 4. So products, and also square roots, change in their exponents alone, and a
        search finds what it would find if float32 had no largest number.
        """
        largest = float(self.values.max(initial=0))
        if not _LARGEST < largest < math.inf:
            return self
        excess = math.frexp(largest)[1] - _USUAL_EXPONENT
        return ColumnWeights(np.ldexp(self.values, -(excess + excess % 2)))

    def content(self) -> memoryview:
        """Return all that decides what it does to a search, to be digested."""
        return np.ascontiguousarray(self.values).data


Weighting = ColumnWeights
"""Weights of errors for an encoder; None where a caller has nothing to tell, and all columns count alike."""
