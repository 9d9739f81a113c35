"""Importances: which columns of a weight matter.

An importance matrix holds, for every weight that multiplies activations, the sum over the seen rows
of the squared activation of each column. Quantization searches weigh an error in column c by the
mean of that sum, so columns that carry large activations keep more precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Importance:
    """Summed squared activations of one weight.

    values  float32 (n_mats, n_cols): one row per expert or per MLA head, or a single row
    counts  float32 (n_mats,): how many rows each sum was taken over (0: never routed to)
    """

    values: npt.NDArray[np.float32]
    counts: npt.NDArray[np.float32]


Importances = Mapping[str, Importance]
