"""What an importance matrix file holds, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gguf_tools.text import printable, table
from quantize.importances.entries import ImportanceEntry, ImportanceFile


def describe(contents: ImportanceFile) -> dict[str, Any]:
    """Return the file as plain data: where it comes from, and a row per entry.

    An entry has n_mats and n_cols as stored, the smallest and the largest count, the number of matrices that
    have seen nothing, and the mean of all weights.
    """
    return {
        "format": contents.format,
        "datasets": list(contents.datasets),
        "chunk_count": contents.chunk_count,
        "chunk_size": contents.chunk_size,
        "entries": [{"name": name, **_facts(entry)} for name, entry in contents.entries.items()],
    }


def _facts(entry: ImportanceEntry) -> dict[str, Any]:
    with np.errstate(all="ignore"):  # NaN and infinity are shown as they are
        counts = entry.whole_counts()
        mean = entry.weights().mean(dtype=np.float64)
    n_mats, n_cols = entry.shape
    return {
        "n_mats": n_mats,
        "n_cols": n_cols,
        "min_count": _whole(counts.min()),
        "max_count": _whole(counts.max()),
        "n_unseen": int(np.count_nonzero(counts <= 0)),
        "mean": float(mean),
    }


def _whole(count: np.float32) -> int | float:
    return int(count) if np.isfinite(count) else float(count)


def description_lines(contents: ImportanceFile) -> Iterator[str]:
    """Yield `describe` as text."""
    facts = describe(contents)
    datasets = ", ".join(map(printable, facts["datasets"])) or "unknown"
    size = f" of {facts['chunk_size']} tokens" if facts["chunk_size"] else ""
    yield f"{len(facts['entries'])} entries, form {facts['format']}"
    yield f"datasets: {datasets}; {facts['chunk_count']} chunks{size}"
    rows = [("name", "matrices", "columns", "counts", "mean square", "")]
    for entry in facts["entries"]:
        low, high = entry["min_count"], entry["max_count"]
        rows.append(
            (
                printable(entry["name"]),
                str(entry["n_mats"]),
                str(entry["n_cols"]),
                str(high) if low == high else f"{low} to {high}",
                f"{entry['mean']:.4g}",
                f"{entry['n_unseen']} never seen" if entry["n_unseen"] else "",
            )
        )
    yield from table(rows, right=(1, 2, 3, 4))
