"""Importance matrices: which columns of a model's weights matter.

>>> import imatrix
>>> found = imatrix.load("model.imatrix")        # either format   # doctest: +SKIP
>>> imatrix.save("model.imatrix.gguf", found)                      # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imatrix.store import ImportanceFile, load, save

__all__ = ["ImportanceFile", "load", "save"]

_HOMES = {"ImportanceFile": "imatrix.store", "load": "imatrix.store", "save": "imatrix.store"}


def __getattr__(name: str) -> Any:
    # Nothing is imported before it is used, so that a command's --help stays instant.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
