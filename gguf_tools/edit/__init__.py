"""Changed headers of GGUF files, and files split and merged.

>>> from gguf_tools import edit
>>> named = edit.parse_assignment("general.name=DeepSeek V2 Lite")
>>> outcome = edit.edit_model(
...     "model-bf16.gguf", lambda metadata, names: edit.set_values(metadata, [named]), output="named.gguf"
... )
>>> outcome.changes[0].name, outcome.files[0].how
('general.name', 'written')
"""

from gguf_tools.lazy import public_names

__all__, __getattr__, __dir__ = public_names(__name__)
