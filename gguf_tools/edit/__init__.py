"""Changed headers of GGUF files, and files split and merged.

>>> from gguf_tools import edit
>>> named = edit.parse_assignment("general.name=DeepSeek V2 Lite")
>>> outcome = edit.edit_model(
...     "model-bf16.gguf", lambda metadata, names: edit.set_values(metadata, [named]), output="named.gguf"
... )
>>> outcome.changes[0].name, outcome.files[0].how
('general.name', 'written')
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_tools.lazy import lazy_names

if TYPE_CHECKING:
    from gguf_tools.edit.header_edits import (
        Edited,
        parse_assignment,
        remove_keys,
        rename_keys,
        rename_tensors,
        set_values,
    )
    from gguf_tools.edit.model_edits import edit_model, recover

__all__ = [
    "Edited",
    "edit_model",
    "parse_assignment",
    "recover",
    "remove_keys",
    "rename_keys",
    "rename_tensors",
    "set_values",
]

_HOMES = {
    "Edited": "gguf_tools.edit.header_edits",
    "edit_model": "gguf_tools.edit.model_edits",
    "parse_assignment": "gguf_tools.edit.header_edits",
    "recover": "gguf_tools.edit.model_edits",
    "remove_keys": "gguf_tools.edit.header_edits",
    "rename_keys": "gguf_tools.edit.header_edits",
    "rename_tensors": "gguf_tools.edit.header_edits",
    "set_values": "gguf_tools.edit.header_edits",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
