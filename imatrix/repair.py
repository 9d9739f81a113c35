"""Fill the gaps of an importance matrix, and give it the rows that files in other layouts want.

`repair` lists every change:

    attn_kv_b from attn_v_b      the mean of the heads' sums and counts, as quantization takes it
    attn_v_b from attn_kv_b      every head takes the latents' sums; needs the number of heads
    gate from up, up from gate   both multiply the same activations
    merged from parts, and back  of gate_up and attn_qkv, as far as the model has them
    unseen experts               neutral weights: all columns get the mean energy of the experts seen

Non-finite and negative numbers are not repaired: they mean that collecting went wrong.

`in_layout_both` is for files in other layouts of latent attention than llama.cpp's. A matrix has the inputs
of attn_k_b and attn_v_b head by head. In layout both, which ik_llama.cpp wants, the heads of each stand in
one 2-D matrix. Its llama-quantize takes one row of values for such a matrix, and stops at any other number of
them (llama-quantize.cpp: "imatrix size ... is different from tensor size"). So the heads' values become their
mean, and attn_kv_b, which multiplies what attn_v_b does, gets the same.

attn_output_a of DeepSeek V4 has the inputs of groups of heads. llama-imatrix keeps a row of values for each
group, and both programs' llama-quantize take one, so these become their mean, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from gguf_tools.errors import BadImportance, BadRequest
from quantize.importances.entries import Importance, ImportanceEntry, ImportanceFile, refuse_nonfinite
from quantize.roles import Role, has_row_groups, siblings_with_same_activations, tensor_role

_HEADS = re.compile(r"^(blk\.\d+\.)attn_v_b\.weight$")
_LATENTS = re.compile(r"^(blk\.\d+\.)attn_kv_b\.weight$")
_GATE_OR_UP = re.compile(r"^(blk\.\d+\.ffn_)(gate|up)((?:_exps|_shexp)?\.weight)$")


@dataclass(frozen=True)
class Repaired:
    """The result, and one line for each change."""

    importances: ImportanceFile
    changes: tuple[str, ...]


def repair(contents: ImportanceFile, n_heads: int | None = None, names: Iterable[str] = ()) -> Repaired:
    """Fill every gap of a matrix for which the other entries say enough.

    n_heads  attention heads of the model; None: inferred from entries that have a row per head
    names    tensors of the model, each of which may have an entry of its own
    raises   BadImportance for NaN and infinity
    """
    refuse_nonfinite(contents.entries)
    entries = dict(contents.entries)
    changes = []

    def derive_siblings(entries: dict[str, ImportanceEntry], n_heads: int | None) -> Iterator[_Change]:
        for name in names:
            siblings = siblings_with_same_activations(name)
            known = next((other for other in siblings if other in entries), None)
            if known is not None and name not in entries and tensor_role(name, (1, 1)).role not in _LATENT:
                yield name, entries[known], f"from {known}, {_SAME}"

    for step in (_derive_latents, _derive_heads, derive_siblings, _derive_gate_and_up, _fill_unseen):
        for name, entry, change in list(step(entries, n_heads)):
            entries[name] = entry
            changes.append(f"{name}: {change}")
    repaired = replace(contents, entries=dict(sorted(entries.items())), path=None)
    return Repaired(repaired, tuple(changes))


_Change = tuple[str, ImportanceEntry, str]

_SAME = "which multiplies the same activations"

_LATENT = (Role.ATTN_KV_B, Role.ATTN_V_B)
"""Siblings whose entries have other sizes."""


def _derive_latents(entries: dict[str, ImportanceEntry], n_heads: int | None) -> Iterator[_Change]:
    for name, entry in entries.items():
        match = _HEADS.match(name)
        target = match and f"{match[1]}attn_kv_b.weight"
        heads = len(entry.counts) if len(entry.counts) > 1 else n_heads
        if not target or target in entries or heads is None or entry.n_values % heads:
            continue
        values = entry.read().reshape(heads, -1)
        sums = values.sum(0, dtype=np.float64, keepdims=True) / heads
        count = entry.counts.mean(dtype=np.float64, keepdims=True)
        yield target, Importance(sums.astype(np.float32), count.astype(np.float32)), f"from {name}"


def _derive_heads(entries: dict[str, ImportanceEntry], n_heads: int | None) -> Iterator[_Change]:
    for name, entry in entries.items():
        match = _LATENTS.match(name)
        target = match and f"{match[1]}attn_v_b.weight"
        if target and target not in entries and n_heads is not None and len(entry.counts) == 1:
            yield target, Importance(np.tile(entry.read(), (1, n_heads)), entry.counts), f"from {name}"


def _derive_gate_and_up(entries: dict[str, ImportanceEntry], n_heads: int | None) -> Iterator[_Change]:
    for name, entry in entries.items():
        match = _GATE_OR_UP.match(name)
        if match is None:
            continue
        other = f"{match[1]}{'up' if match[2] == 'gate' else 'gate'}{match[3]}"
        if other not in entries:
            yield other, entry, f"from {name}, {_SAME}"


def _fill_unseen(entries: dict[str, ImportanceEntry], n_heads: int | None) -> Iterator[_Change]:
    for name, entry in entries.items():
        unseen = entry.whole_counts() <= 0
        if not unseen.any() or unseen.all():
            continue
        level = entry.weights()[~unseen].mean(dtype=np.float64)
        values, counts = entry.read().copy(), entry.counts.copy()
        values[unseen], counts[unseen] = np.float32(level), 1
        which = ", ".join(map(str, np.flatnonzero(unseen)[:8])) + (" ..." if unseen.sum() > 8 else "")
        change = f"{int(unseen.sum())} of {len(counts)} matrices had seen nothing, now neutral ({which})"
        yield name, Importance(values, counts), change


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
        for sibling in siblings_with_same_activations(name):
            entries.setdefault(sibling, entry)
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
