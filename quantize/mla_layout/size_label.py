"""The size label of a model whose layout changes.

It counts attn_kv_b besides attn_k_b and attn_v_b, so it follows the layout. A label that somebody wrote by
hand, into a model card for instance, does not, and is to be kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from gguf_tools.format import keys
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from gguf_tools.look.model_size import count_parameters


def relabelled(metadata: Metadata, old: Iterable[TensorInfo], new: Iterable[TensorInfo]) -> dict[str, Value]:
    """Return the metadata with the label of the tensors `new`, if the one there is that of `old`."""
    changed = dict(metadata)
    if keys.SIZE_LABEL in changed and changed[keys.SIZE_LABEL].data == _size_label(old):
        changed[keys.SIZE_LABEL] = Value.string(_size_label(new))
    return changed


def _size_label(tensors: Iterable[TensorInfo]) -> str:
    return count_parameters((info.name, info.shape) for info in tensors).size_label
