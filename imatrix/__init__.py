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
    from gguf_tools import __version__
    from gguf_tools.errors import ToolkitError
    from imatrix.collecting import collect
    from imatrix.forward.options import ForwardOptions
    from imatrix.options import Collected, CollectOptions
    from imatrix.store import ImportanceFile, load, save
    from imatrix.texts.tokens import Cut
    from quantize.importances.entries import ImportanceFormat, Importances

__all__ = [
    "CollectOptions",
    "Collected",
    "Cut",
    "ForwardOptions",
    "ImportanceFile",
    "ImportanceFormat",
    "Importances",
    "ToolkitError",
    "__version__",
    "collect",
    "load",
    "save",
]

_HOMES = {
    "CollectOptions": "imatrix.options",
    "Collected": "imatrix.options",
    "Cut": "imatrix.texts.tokens",
    "ForwardOptions": "imatrix.forward.options",
    "ImportanceFile": "imatrix.store",
    "ImportanceFormat": "quantize.importances.entries",
    "Importances": "quantize.importances.entries",
    "ToolkitError": "gguf_tools.errors",
    "__version__": "gguf_tools",
    "collect": "imatrix.collecting",
    "load": "imatrix.store",
    "save": "imatrix.store",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
