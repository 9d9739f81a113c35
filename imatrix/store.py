"""Importance matrix files, written in the GGUF form and in the older `.dat` form.

Their layouts, and how they are read, stand in quantize/importances/files.py. What is written here equals what
llama-imatrix writes, byte for byte.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from gguf_tools.argument_types import checked
from gguf_tools.errors import BadImportance
from gguf_tools.files.early_checks import refuse_to_replace
from gguf_tools.files.named_files import whole_file
from gguf_tools.files.partial_file import PARTIAL_SUFFIX, GGUFWriter, refuse_inputs
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value, bytes_of
from gguf_tools.text import shown
from quantize.importances.entries import ImportanceFile, ImportanceFormat, Importances
from quantize.importances.files import COUNTS, SUMS, StoredImportance, load

__all__ = ["ImportanceFile", "format_of", "load", "not_held", "save", "save_dat", "save_gguf"]

_MAX_INT32 = 2**31 - 1


@checked
def save(
    path: str | os.PathLike[str],
    contents: ImportanceFile,
    format: ImportanceFormat | None = None,
    *,
    force: bool = False,
) -> None:
    """Write `contents` to `path`; the file appears whole or not at all.

        imatrix.save("lite.imatrix.dat", imatrix.load("lite.imatrix.gguf"))

    format  "gguf" or "dat"; None: dat for a name that ends with .dat, else gguf
    force   replace a file that is there
    raises  OutputError when it can't be written
    """
    path = Path(path)
    refuse_to_replace([path], force=force)
    if (format or format_of(path)) == "dat":
        save_dat(path, contents)
    else:
        save_gguf(path, contents)


def format_of(path: Path) -> ImportanceFormat:
    """Return the form that a file of that name is written in."""
    return "dat" if path.suffix == ".dat" else "gguf"


def not_held(contents: ImportanceFile, format: ImportanceFormat) -> tuple[str, ...]:
    """Return one line for each part of `contents` that a file of that form can't hold."""
    if format == "gguf":
        return ()
    entries = contents.entries.values()
    n_routed = sum(len(entry.counts) > 1 for entry in entries)
    n_empty = sum(entry.whole_counts().max() <= 0 for entry in entries)
    lost = (
        (n_routed, f"counts per expert of {n_routed} entries, so all experts weigh the same in a merge"),
        (n_empty, f"{n_empty} entries that saw nothing"),
        (contents.chunk_size, f"the chunk size ({contents.chunk_size} tokens)"),
        (len(contents.datasets) > 1, f"all but the last of {len(contents.datasets)} datasets"),
    )
    return tuple(f"the .dat form does not hold {what}" for is_lost, what in lost if is_lost)


# The GGUF form


def save_gguf(path: str | os.PathLike[str], contents: ImportanceFile) -> None:
    """Write `contents` in the GGUF form, byte for byte as llama-imatrix does.

    raises  OutputError when it can't be written
    """
    metadata = {
        keys.TYPE: Value.string("imatrix"),
        keys.IMATRIX_DATASETS: Value.strings(contents.datasets),
        keys.IMATRIX_CHUNK_COUNT: Value.u32(contents.chunk_count),
        keys.IMATRIX_CHUNK_SIZE: Value.u32(contents.chunk_size),
    }
    _refuse_sources(Path(path), contents)
    infos = []
    for name in sorted(contents.entries, key=bytes_of):
        n_mats, n_cols = contents.entries[name].shape
        infos.append(TensorInfo(name + SUMS, (n_mats, n_cols) if n_mats > 1 else (n_cols,), F32))
        infos.append(TensorInfo(name + COUNTS, (n_mats, 1) if n_mats > 1 else (1,), F32))
    layout = FileLayout.of(metadata, infos)
    with GGUFWriter(path, layout) as writer:
        for name, entry in contents.entries.items():
            writer.write(layout.offset_of(name + SUMS), np.ascontiguousarray(entry.read(), "<f4"))
            writer.write(layout.offset_of(name + COUNTS), np.ascontiguousarray(entry.counts, "<f4"))
        writer.publish()


# The .dat form


def save_dat(path: str | os.PathLike[str], contents: ImportanceFile) -> None:
    """Write `contents` in the `.dat` form, byte for byte as llama-imatrix does.

    Counts per expert, the chunk size and all but the last dataset are not held by this form.
    raises  OutputError when it can't be written, BadImportance for a number that this form can't hold
    """
    _refuse_sources(Path(path), contents)
    entries = {
        name: contents.entries[name]
        for name in sorted(contents.entries, key=bytes_of)
        if contents.entries[name].whole_counts().max() > 0
    }
    dataset = contents.datasets[-1] if contents.datasets else ""
    if abs(contents.chunk_count) > _MAX_INT32:
        raise BadImportance(f"{contents.chunk_count} chunks, the .dat form holds up to {_MAX_INT32}")
    trailer = struct.pack("<i", contents.chunk_count) + _dat_string(dataset)
    blocks = _dat_blocks(entries, contents.chunk_size)
    with whole_file(Path(path)) as file:
        file.writelines(chain([struct.pack("<i", len(entries))], blocks, [trailer]))


def _dat_blocks(entries: Importances, chunk_size: int) -> Iterator[bytes]:
    for name, entry in entries.items():
        counts = entry.whole_counts()
        largest = float(counts.max())
        n_calls = -(-int(largest) // max(1, chunk_size)) if math.isfinite(largest) else _MAX_INT32 + 1
        if n_calls > _MAX_INT32:
            raise BadImportance(f"{shown(name)}: a count of {largest}, more than the .dat form holds")
        means = entry.weights() * np.float32(n_calls)
        # A sum over n_calls is what the form holds: spare it the rounding of a division and a product.
        values = np.where(counts[:, np.newaxis] == n_calls, entry.read(), means)
        yield _dat_string(name) + struct.pack("<ii", n_calls, values.size)
        yield values.astype("<f4").tobytes()


def _dat_string(text: str) -> bytes:
    data = bytes_of(text)
    return struct.pack("<i", len(data)) + data


def _refuse_sources(path: Path, contents: ImportanceFile) -> None:
    """Raise OutputError if what is written for `path` would destroy a file that `contents` are read from."""
    entries = contents.entries.values()
    sources = {entry.path for entry in entries if isinstance(entry, StoredImportance)}
    refuse_inputs(path.with_name(path.name + PARTIAL_SUFFIX), sources)
