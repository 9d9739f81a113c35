"""Public names of gguf_tools.edit and their homes, for type checkers and for `gguf_tools.lazy`."""

from gguf_tools.edit.header_edits import Edited as Edited
from gguf_tools.edit.header_edits import parse_assignment as parse_assignment
from gguf_tools.edit.header_edits import remove_keys as remove_keys
from gguf_tools.edit.header_edits import rename_keys as rename_keys
from gguf_tools.edit.header_edits import rename_tensors as rename_tensors
from gguf_tools.edit.header_edits import set_values as set_values
from gguf_tools.edit.model_edits import edit_model as edit_model
from gguf_tools.edit.model_edits import recover as recover
