"""Weightings: how much an error in a weight costs, as an encoder's search is told.

Today that is a weight for each column. Second moments, by which errors of two columns count together, can
join as a second class: `Weighting` becomes the union of both, and a codec says which it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class ColumnWeights:
    """The cost of an error (x - q)**2 in each column.

    values  float32 (n_cols,)
    """

    values: npt.NDArray[np.float32]

    def content(self) -> memoryview:
        """Return all that decides what it does to a search, to be digested."""
        return np.ascontiguousarray(self.values).data


Weighting = ColumnWeights
"""What an encoder weighs errors by; None where a caller has nothing to tell, and all columns count alike."""
