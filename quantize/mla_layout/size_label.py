"""The size label that a converter gives a model: `16x5.7M`, so many experts, each with all shared weights.

It counts attn_kv_b besides attn_k_b and attn_v_b, so it follows the layout. A label that somebody wrote by
hand, into a model card for instance, does not, and is to be kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from gguf_tools import keys
from gguf_tools.tensors import TensorInfo
from gguf_tools.values import Metadata, Value


def size_label(tensors: Iterable[TensorInfo]) -> str:
    """Return the label of a model with routed experts, `1.5B` for a dense one."""
    shared = one_of_each = 0
    n_experts: list[int] = []
    for info in tensors:
        if "_exps." in info.name and len(info.shape) >= 3:
            n_experts.append(info.shape[-3])
            one_of_each += info.n_elems // info.shape[-3]
        else:
            shared += info.n_elems
    rounded = _rounded(shared + one_of_each)
    return f"{sum(n_experts) // len(n_experts)}x{rounded}" if n_experts else rounded


def relabelled(metadata: Metadata, old: Iterable[TensorInfo], new: Iterable[TensorInfo]) -> dict[str, Value]:
    """Return the metadata with the label of the tensors `new`, if the one there is that of `old`."""
    changed = dict(metadata)
    if keys.SIZE_LABEL in changed and changed[keys.SIZE_LABEL].data == size_label(old):
        changed[keys.SIZE_LABEL] = Value.string(size_label(new))
    return changed


def _rounded(n_weights: int) -> str:
    """Return a number in at least two digits: 671026419200 -> 671B, 5700000 -> 5.7M."""
    units = ((1e12, 1e-12, "T"), (1e9, 1e-9, "B"), (1e6, 1e-6, "M"))
    scale, suffix = next(((scale, suffix) for over, scale, suffix in units if n_weights > over), (1e-3, "K"))
    scaled = n_weights * scale
    n_digits = len(str(round(scaled)).lstrip("0"))
    return f"{scaled:.{max(2 - n_digits, 0)}f}{suffix}"
