"""Importances of latent attention for files in other layouts than llama.cpp's.

A matrix has the inputs of attn_k_b and attn_v_b head by head. In layout both, which ik_llama.cpp wants, the
heads of each stand in one 2-D matrix. Its llama-quantize takes one row of values for such a matrix, and stops
at any other number of them (llama-quantize.cpp: "imatrix size ... is different from tensor size"). So the
heads' values become their mean, and attn_kv_b, which multiplies what attn_v_b does, gets the same.

attn_output_a of DeepSeek V4 has the inputs of groups of heads. llama-imatrix keeps a row of values for each
group, and both programs' llama-quantize take one, so these become their mean, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gguf_tools.errors import BadImportance, BadRequest
from quantize.importances.entries import Importance, ImportanceEntry, ImportanceFile
from quantize.roles import Role, has_row_groups, sibling_with_same_activations, tensor_role

_OF_HEADS = (Role.ATTN_K_B, Role.ATTN_V_B)


def in_layout_both(
    contents: ImportanceFile, n_heads: int | None, n_cols: Mapping[str, int]
) -> ImportanceFile:
    """Return the importances with one row for all heads of attn_k_b, of attn_v_b and of attn_kv_b.

    So are those of all groups of attn_output_a.
    n_heads  attention heads of the model, None when it does not say
    n_cols   elements of a row, by tensor of the model; an entry of so many values has one row already
    raises   BadRequest if there are heads and n_heads is None, BadImportance for another number of values
    """
    entries: dict[str, ImportanceEntry] = dict(contents.entries)
    for name, entry in contents.entries.items():
        if has_row_groups(name) and entry.n_values != n_cols.get(name, entry.n_values):
            entries[name] = _mean_over_heads(name, entry, entry.n_values // n_cols[name])
        if tensor_role(name, (1, 1)).role not in _OF_HEADS:
            continue
        if entry.n_values != n_cols.get(name):
            if n_heads is None:
                raise BadRequest(f"{name}: has values for every head, and the model does not say how many")
            entry = _mean_over_heads(name, entry, n_heads)
        entries[name] = entry
        sibling = sibling_with_same_activations(name)
        if sibling is not None and sibling not in contents.entries:
            entries[sibling] = entry
    return replace(contents, entries=dict(sorted(entries.items())), path=None)


def notes_on_groups(contents: ImportanceFile) -> tuple[str, ...]:
    """Note entries that have a row for each group of a matrix's rows."""
    if not any(map(has_row_groups, contents.entries)):
        return ()
    return (
        "attn_output_a has a row of values for each group of heads, as from llama-imatrix; llama-quantize"
        " takes one, see imatrix convert --mla both",
    )


def _mean_over_heads(name: str, entry: ImportanceEntry, n_heads: int) -> Importance:
    """Return an entry with a row for every head as one row; heads that have seen nothing don't count."""
    if entry.n_values % n_heads or len(entry.counts) not in (1, n_heads):
        raise BadImportance(
            f"{name}: found {entry.n_values} values and {len(entry.counts)} counts, expected those of"
            f" {n_heads} heads; was the matrix made for another model?"
        )
    sums = entry.read().reshape(n_heads, -1)
    counts = np.broadcast_to(entry.counts, (n_heads,)).astype(np.float64)
    seen = counts > 0
    if not seen.any():
        return Importance(np.zeros((1, sums.shape[1]), np.float32), np.zeros(1, np.float32))
    values = sums[seen].mean(axis=0, dtype=np.float64, keepdims=True)
    return Importance(values.astype(np.float32), counts[seen].mean(keepdims=True).astype(np.float32))
