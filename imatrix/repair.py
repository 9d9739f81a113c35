"""Fill the gaps of an importance matrix, and list every change.

    attn_kv_b from attn_v_b      the mean of the heads' sums and counts, as quantization takes it
    attn_v_b from attn_kv_b      every head takes the latents' sums; needs the number of heads
    gate from up, up from gate   both multiply the same activations
    unseen experts               neutral weights: all columns get the mean energy of the experts seen

Non-finite and negative numbers are not repaired: they mean that collecting went wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from quantize.importances.entries import Importance, ImportanceEntry, ImportanceFile, refuse_nonfinite

_HEADS = re.compile(r"^(blk\.\d+\.)attn_v_b\.weight$")
_LATENTS = re.compile(r"^(blk\.\d+\.)attn_kv_b\.weight$")
_GATE_OR_UP = re.compile(r"^(blk\.\d+\.ffn_)(gate|up)((?:_exps|_shexp)?\.weight)$")


@dataclass(frozen=True)
class Repaired:
    """The result, and one line for each change."""

    importances: ImportanceFile
    changes: tuple[str, ...]


def repair(contents: ImportanceFile, n_heads: int | None = None) -> Repaired:
    """Fill every gap of a matrix for which the other entries say enough.

    n_heads  attention heads of the model; None: inferred from entries that have a row per head
    raises   BadImportance for NaN and infinity
    """
    refuse_nonfinite(contents.entries)
    entries = dict(contents.entries)
    changes = []
    for step in (_derive_latents, _derive_heads, _derive_gate_and_up, _fill_unseen):
        for name, entry, change in list(step(entries, n_heads)):
            entries[name] = entry
            changes.append(f"{name}: {change}")
    repaired = replace(contents, entries=dict(sorted(entries.items())), path=None)
    return Repaired(repaired, tuple(changes))


_Change = tuple[str, ImportanceEntry, str]


def _derive_latents(entries: dict[str, ImportanceEntry], n_heads: int | None) -> Iterator[_Change]:
    for name, entry in entries.items():
        match = _HEADS.match(name)
        target = match and f"{match[1]}attn_kv_b.weight"
        heads = _heads_of(entry, n_heads)
        if not target or target in entries or heads is None:
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


def _heads_of(entry: ImportanceEntry, n_heads: int | None) -> int | None:
    """Return the number of heads in an entry, None when it is not known or doesn't fit."""
    heads = len(entry.counts) if len(entry.counts) > 1 else n_heads
    return heads if heads is not None and entry.n_values % heads == 0 else None


def _derive_gate_and_up(entries: dict[str, ImportanceEntry], n_heads: int | None) -> Iterator[_Change]:
    for name, entry in entries.items():
        match = _GATE_OR_UP.match(name)
        if match is None:
            continue
        other = f"{match[1]}{'up' if match[2] == 'gate' else 'gate'}{match[3]}"
        if other not in entries:
            yield other, entry, f"from {name}, which multiplies the same activations"


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
