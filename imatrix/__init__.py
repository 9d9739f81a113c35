"""Importance matrices: which columns of a model's weights matter.

>>> import imatrix
>>> matrix = imatrix.load("model.imatrix")  # either format
>>> matrix.entries["blk.1.ffn_up_exps.weight"].shape  # experts, columns
(16, 256)
>>> imatrix.save("model.imatrix.dat", matrix)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_tools.lazy import lazy_names

if TYPE_CHECKING:
    from imatrix.store import ImportanceFile, load, save

__all__ = ["ImportanceFile", "load", "save"]

_HOMES = {"ImportanceFile": "imatrix.store", "load": "imatrix.store", "save": "imatrix.store"}

__getattr__ = lazy_names(__name__, _HOMES)
