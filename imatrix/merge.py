"""Merge importance matrices: sums and counts are added up, per expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gguf_tools.errors import BadImportance
from quantize.importances.entries import Importance, ImportanceEntry, ImportanceFile


@dataclass(frozen=True)
class Merged:
    """The result, and lines for the report."""

    importances: ImportanceFile
    notes: tuple[str, ...]


def merge(files: Sequence[ImportanceFile]) -> Merged:
    """Add up matrices, as if all their texts had been collected from in one go.

    Files in the `.dat` form count chunks, not tokens. When merged with other files, their chunks are assumed
    to be as long as the others'.
    raises  BadImportance naming both files when sizes differ, or when there is nothing to merge
    """
    if not files:
        raise BadImportance("nothing to merge")
    chunk_size = max(file.chunk_size for file in files)
    notes = [
        f"{_called(file)} counts chunks of unknown size: taken for {chunk_size} tokens"
        for file in files
        if not file.chunk_size and chunk_size
    ]
    entries: dict[str, ImportanceEntry] = {}
    first: dict[str, ImportanceFile] = {}
    for file in files:
        for name, entry in file.entries.items():
            scaled = entry if file.chunk_size or not chunk_size else _times(entry, chunk_size)
            if name in entries:
                entries[name] = _sum(name, (first[name], entries[name]), (file, scaled))
            else:
                first[name], entries[name] = file, scaled
    notes += [
        f"{_called(file)} has no data for {len(missing)} entries ({missing[0]}{' ...' * (len(missing) > 1)})"
        for file in files
        if (missing := [name for name in entries if name not in file.entries])
    ]
    tokens = sum(file.chunk_count * (file.chunk_size or chunk_size or 1) for file in files)
    datasets = dict.fromkeys(name for file in files for name in file.datasets)
    contents = ImportanceFile(
        dict(sorted(entries.items())), tuple(datasets), -(-tokens // (chunk_size or 1)), chunk_size
    )
    return Merged(contents, tuple(notes))


def _times(entry: ImportanceEntry, factor: int) -> Importance:
    return Importance(entry.read() * np.float32(factor), entry.counts * np.float32(factor))


def _sum(
    name: str, one: tuple[ImportanceFile, ImportanceEntry], other: tuple[ImportanceFile, ImportanceEntry]
) -> Importance:
    (file_a, a), (file_b, b) = one, other
    n_counts = max(len(a.counts), len(b.counts))
    if a.n_values != b.n_values or any(n_counts % len(entry.counts) for entry in (a, b)):
        raise BadImportance(
            f"{name}: {_called(file_a)} has {_size(a)}, {_called(file_b)} has {_size(b)}; of another model?"
        )
    values = a.read().astype(np.float64).reshape(n_counts, -1) + b.read().reshape(n_counts, -1)
    counts = _spread(a, n_counts) + _spread(b, n_counts)
    return Importance(values.astype(np.float32), counts.astype(np.float32))


def _spread(entry: ImportanceEntry, n_counts: int) -> np.ndarray:
    """Return the counts, float64 (n_counts,); a single count is repeated for all matrices."""
    return np.repeat(entry.counts.astype(np.float64), n_counts // len(entry.counts))


def _size(entry: ImportanceEntry) -> str:
    return f"{entry.n_values} values and {len(entry.counts)} counts"


def _called(file: ImportanceFile) -> str:
    return "the collected data" if file.path is None else str(file.path)
