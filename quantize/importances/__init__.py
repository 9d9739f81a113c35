"""Importances: entries per tensor, the files they come in, and how they weigh errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from typing import Any

    import numpy.typing as npt

    from quantize.importances.entries import ImportanceEntry, ImportanceFile

ImportanceSource = Union[
    "ImportanceFile", Mapping[str, "ImportanceEntry | npt.NDArray[Any]"], str, os.PathLike[str]
]
"""Importances as a caller has them: from `load`; as a path; or as a mapping of the name of a tensor to an
Importance, or to an array (n_cols,) or (n_mats, n_cols) of how much each column counts."""
