"""Importance matrix files: the GGUF form and the older `.dat` form, read and written.

The layouts are facts of llama.cpp (tools/imatrix/imatrix.cpp: save_imatrix, save_imatrix_legacy;
common/imatrix-loader.cpp).

GGUF form: a GGUF file with the metadata

    general.type         string   "imatrix"
    imatrix.datasets     strings  names of the calibration texts
    imatrix.chunk_count  uint32   chunks of text seen
    imatrix.chunk_size   uint32   tokens per chunk

and for every weight NAME, sorted by name, two F32 tensors:

    NAME.in_sum2   (n_mats, n_cols)  sums of squared activations
    NAME.counts    (n_mats, 1)       rows summed, per expert. What is not routed has a single count, so the
                                     heads of `attn_k_b` and `attn_v_b` are end to end in one row of in_sum2

`.dat` form, little-endian:

    int32 n_entries
    per entry, sorted by name:
      int32 length, bytes name
      int32 n_calls                 chunks seen: max(counts) / chunk_size, rounded up
      int32 n_values, float32 values[n_values]
                                    (sum / count) * n_calls; 1 * n_calls for an expert that saw nothing
    int32 n_chunks                  trailer, may be missing
    int32 length, bytes dataset

So `.dat` has no counts per expert: each entry has been normalised, and experts carry equal weight when two
files are merged. Entries that saw nothing at all are left out.

Opening a file reads its names, shapes and counts; values stay unread (see stored.py).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from gguf_tools.errors import BadImportance, OutputError
from gguf_tools.ggml_types import F32
from gguf_tools.layout import FileLayout
from gguf_tools.reader import GGUFFile
from gguf_tools.tensors import TensorInfo
from gguf_tools.text import shown
from gguf_tools.values import Value, bytes_of
from gguf_tools.writer import PARTIAL_SUFFIX, GGUFWriter, refuse_inputs
from imatrix.stored import OpenFile, StoredImportance
from quantize.importance import ImportanceEntry, ImportanceFile, ImportanceFormat, Importances

__all__ = ["ImportanceFile", "format_of", "load", "not_held", "save", "save_dat", "save_gguf"]

# Bounds on what a hostile file can ask for: several times what the largest models have.
MAX_ENTRIES = 1 << 16
MAX_COUNTS = 1 << 12
MAX_VALUES = 1 << 23
MAX_TEXT_BYTES = 1 << 12

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_INT32 = 2**31 - 1


def load(path: str | os.PathLike[str]) -> ImportanceFile:
    """Return the contents of an importance matrix file in either form, their values unread.

    raises  BadImportance when it is neither, contradicts itself or holds nothing;
            GGUFError when it is a damaged GGUF file
    """
    path = Path(path)
    try:
        # O_NONBLOCK: opening a pipe would wait for its writer.
        file = OpenFile(path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        if not path.is_file():
            raise BadImportance(f"{path}: not a regular file")
        is_gguf = file.n_bytes >= 4 and file.read(0, 4, "the first bytes").tobytes() == b"GGUF"
        contents = _load_gguf(path) if is_gguf else _load_dat(file)
    except OSError as error:
        raise BadImportance(f"{path}: can't be read ({error.strerror})") from error
    if not contents.entries:
        raise BadImportance(f"{path}: holds no importances")
    return contents


def save(
    path: str | os.PathLike[str], contents: ImportanceFile, format: ImportanceFormat | None = None
) -> None:
    """Write `contents` to `path`; the file appears whole or not at all.

    format  "gguf" or "dat"; None: dat for a name that ends with .dat, else gguf
    raises  OutputError when it can't be written
    """
    path = Path(path)
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


def _load_gguf(path: Path) -> ImportanceFile:
    with GGUFFile(path) as file:
        opened = OpenFile(path, os.dup(file.fileno()))
        names = {
            suffix: {name.removesuffix(suffix) for name in file.tensors if name.endswith(suffix)}
            for suffix in (_SUMS, _COUNTS)
        }
        if not names[_SUMS]:
            raise BadImportance(f"{path}: not an importance matrix: GGUF without a tensor NAME{_SUMS}")
        unpaired = sorted(names[_SUMS] ^ names[_COUNTS])
        if unpaired:
            name = shown(unpaired[0])
            raise BadImportance(f"{path}: {name}: found one of {_SUMS} and {_COUNTS}, expected both")
        if len(names[_SUMS]) > MAX_ENTRIES:
            raise BadImportance(f"{path}: {len(names[_SUMS])} entries, expected at most {MAX_ENTRIES}")
        return ImportanceFile(
            entries={name: _gguf_entry(file, opened, name) for name in sorted(names[_SUMS])},
            datasets=_texts(file, "imatrix.datasets"),
            chunk_count=_whole_number(file, "imatrix.chunk_count"),
            chunk_size=_whole_number(file, "imatrix.chunk_size"),
            path=path,
        )


def _texts(file: GGUFFile, key: str) -> tuple[str, ...]:
    found = file.get(key, ())
    if not isinstance(found, tuple | list) or not all(isinstance(text, str) for text in found):
        raise BadImportance(f"{file.path}: {key}: found {found!r:.60}, expected a list of names")
    return tuple(found)


def _whole_number(file: GGUFFile, key: str) -> int:
    found = file.get(key, 0)
    if not isinstance(found, int) or found < 0:
        raise BadImportance(f"{file.path}: {key}: found {found!r:.60}, expected a whole number")
    return found


def _gguf_entry(file: GGUFFile, opened: OpenFile, name: str) -> StoredImportance:
    for tensor in (name + _SUMS, name + _COUNTS):
        if file.tensors[tensor].type != F32:
            found = file.tensors[tensor].type.name
            raise BadImportance(f"{file.path}: {shown(tensor)}: found {found}, expected F32")
    n_values, n_counts = file.tensors[name + _SUMS].n_elems, file.tensors[name + _COUNTS].n_elems
    if not n_counts or not n_values or n_values % n_counts:
        raise BadImportance(
            f"{file.path}: {shown(name)}: found {n_values} values and {n_counts} counts,"
            " expected as many values for each count"
        )
    if n_values > MAX_VALUES or n_counts > MAX_COUNTS:
        raise BadImportance(
            f"{file.path}: {shown(name)}: found {n_values} values and {n_counts} counts, expected at most"
            f" {MAX_VALUES} and {MAX_COUNTS}"
        )
    order = "<f4" if file.endian == "little" else ">f4"
    counts = opened.read(file.data_offset(name + _COUNTS), 4 * n_counts, f"the counts of {name}")
    return StoredImportance(
        opened,
        name,
        file.data_offset(name + _SUMS),
        order,
        (n_counts, n_values // n_counts),
        counts.view(order).astype(np.float32),
    )


def save_gguf(path: str | os.PathLike[str], contents: ImportanceFile) -> None:
    """Write `contents` in the GGUF form, byte for byte as llama-imatrix does.

    raises  OutputError when it can't be written
    """
    metadata = {
        "general.type": Value.string("imatrix"),
        "imatrix.datasets": Value.strings(contents.datasets),
        "imatrix.chunk_count": Value.u32(contents.chunk_count),
        "imatrix.chunk_size": Value.u32(contents.chunk_size),
    }
    _refuse_sources(Path(path), contents)
    infos = []
    for name in sorted(contents.entries, key=bytes_of):
        n_mats, n_cols = contents.entries[name].shape
        infos.append(TensorInfo(name + _SUMS, (n_mats, n_cols) if n_mats > 1 else (n_cols,), F32))
        infos.append(TensorInfo(name + _COUNTS, (n_mats, 1) if n_mats > 1 else (1,), F32))
    layout = FileLayout.of(metadata, infos)
    with GGUFWriter(path, layout) as writer:
        for name, entry in contents.entries.items():
            writer.write(layout.offset_of(name + _SUMS), np.ascontiguousarray(entry.read(), "<f4"))
            writer.write(layout.offset_of(name + _COUNTS), np.ascontiguousarray(entry.counts, "<f4"))
        writer.publish()


# The .dat form


def _load_dat(file: OpenFile) -> ImportanceFile:
    path = file.path
    cursor = _Cursor(file)
    n_entries = cursor.int32("the number of entries")
    # An entry takes at least a length, a count, a number of values and one value.
    if not 1 <= n_entries <= min(file.n_bytes // 16, MAX_ENTRIES):
        raise BadImportance(
            f"{path}: not an importance matrix: not GGUF, and no .dat with {n_entries} entries"
        )
    entries: dict[str, ImportanceEntry] = {}
    for number in range(1, n_entries + 1):
        name = cursor.string(f"the name of entry {number} of {n_entries}")
        if name in entries:
            raise BadImportance(f"{path}: {shown(name)}: found twice, expected one entry per tensor")
        n_calls = cursor.int32(f"the number of calls of {shown(name)}")
        offset, n_values = cursor.skip_floats(f"the values of {shown(name)}")
        # Without calls, llama-quantize takes the values as they are.
        count = np.float32(n_calls if n_calls > 0 else 1)
        entries[name] = StoredImportance(file, name, offset, "<f4", (1, n_values), np.full(1, count))
    chunk_count = 0 if cursor.at_end else cursor.int32("the number of chunks")
    dataset = "" if cursor.at_end else cursor.string("the name of the dataset")
    return ImportanceFile(entries, (dataset,) if dataset else (), chunk_count, path=path, format="dat")


class _Cursor:
    """Reads numbers and strings from a file, one after the other, never beyond its end."""

    def __init__(self, file: OpenFile) -> None:
        self._file, self._at = file, 0

    @property
    def at_end(self) -> bool:
        return self._at == self._file.n_bytes

    def int32(self, what: str) -> int:
        data = self._file.read(self._skip(4, what), 4, what)
        return int.from_bytes(data.tobytes(), "little", signed=True)

    def string(self, what: str) -> str:
        length = self.int32(f"the length of {what}")
        start = self._skip(length, what)
        if length > MAX_TEXT_BYTES:
            raise BadImportance(
                f"{self._file.path}: damaged, or not an importance matrix: {what} has {length} bytes,"
                f" expected at most {MAX_TEXT_BYTES}"
            )
        return self._file.read(start, length, what).tobytes().decode("utf-8", "surrogateescape")

    def skip_floats(self, what: str) -> tuple[int, int]:
        """Read the number of float32 values that follow; return where they begin and that number."""
        count = self.int32(f"the number of {what}")
        if not 1 <= count <= MAX_VALUES:
            raise BadImportance(
                f"{self._file.path}: found {count} as the number of {what}, expected 1 to {MAX_VALUES}"
            )
        return self._skip(4 * count, what), count

    def _skip(self, n_bytes: int, what: str) -> int:
        start, left = self._at, self._file.n_bytes - self._at
        if not 0 <= n_bytes <= left:
            raise BadImportance(
                f"{self._file.path}: damaged, or not an importance matrix: {what} would take {n_bytes} bytes"
                f" at {start}, and {left} are left"
            )
        self._at += n_bytes
        return start


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
    _write_whole(Path(path), chain([struct.pack("<i", len(entries))], blocks, [trailer]))


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


def _write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write `parts` beside `path` and rename, so that a failure leaves the old file."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        try:
            with partial.open("wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: can't be written ({error.strerror})") from error
