"""Importance matrix files: the GGUF form and the older `.dat` form, and how they are read.

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

Opening a file reads its names, shapes and counts. The values of an entry are read when they are asked for,
and not kept: a model with 256 experts a layer has a gigabyte of importances, and a chunk of its weights needs
one row of them, 28 KB. They are read with `pread`, not mapped: pages of a map count as this process's memory,
and a file that another program shortens meanwhile is an error here and a crash there. The file stays open as
long as one of its entries is in use, so it may be replaced or deleted meanwhile. A run that fills outputs
notices when it is overwritten in place; see `stored_inputs`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.argument_types import checked, described
from gguf_tools.errors import BadImportance, MissingMatrix, WrongType
from gguf_tools.files.inputs import InputFile
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.reader import GGUFFile
from gguf_tools.system.files import NO_WAIT, fill, open_file
from gguf_tools.text import quoted, shown
from quantize.importances import ImportanceSource
from quantize.importances.entries import (
    Importance,
    ImportanceEntry,
    ImportanceFile,
    ResizedImportance,
    checked_weights,
)


class OpenFile:
    """A file that is open for as long as this object is in use; may be read from any thread.

    fd  becomes this object's own
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd
        weakref.finalize(self, os.close, fd)
        self.n_bytes = os.fstat(fd).st_size

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._fd

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process open the file itself, by its path."""
        return _opened, (self.path,)

    def read(self, offset: int, n_bytes: int, what: str) -> npt.NDArray[np.uint8]:
        """Return `n_bytes` bytes from `offset`, uint8; raises BadImportance if they are not there."""
        data = np.empty(n_bytes, np.uint8)
        with BadImportance.from_os(f"{self.path}: {what} can't be read"):
            n_read = fill(self._fd, data.data, offset)
        if n_read < n_bytes:
            raise BadImportance(
                f"{self.path}: {what}: {n_bytes - n_read} of {n_bytes} bytes are missing;"
                " the file has become shorter since it was opened"
            )
        return data


def _opened(path: Path) -> OpenFile:
    return OpenFile(path, open_file(path, os.O_RDONLY))


class StoredImportance(ImportanceEntry):
    """An entry of an open file: its counts are in memory, its sums are read each time they are asked for.

    name    for messages
    offset  of the first value in the file
    dtype   of a value in the file: "<f4" or ">f4"
    shape   n_mats and n_cols
    counts  float32 (n_mats,)
    """

    def __init__(
        self,
        file: OpenFile,
        name: str,
        offset: int,
        dtype: str,
        shape: tuple[int, int],
        counts: npt.NDArray[np.float32],
    ) -> None:
        self.counts = counts
        self._file, self._name, self._offset, self._dtype, self._shape = file, name, offset, dtype, shape

    @property
    def path(self) -> Path:
        """The file that it is in."""
        return self._file.path

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def read(self) -> npt.NDArray[np.float32]:
        """Return the sums, float32 (n_mats, n_cols); raises BadImportance if the file has become shorter."""
        data = self._file.read(self._offset, 4 * prod(self._shape), f"the values of {self._name}")
        return data.view(self._dtype).astype(np.float32, copy=False).reshape(self._shape)

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """The sums, as an entry in memory calls them; each use reads the file: `read` says that better."""
        return self.read()

    def place(self) -> tuple[OpenFile, str, tuple[int, int]]:
        """Return the file, the entry's name, and where its values are: offset and number of bytes."""
        return self._file, self._name, (self._offset, 4 * prod(self._shape))

    def part(self, first: int, shape: tuple[int, int], counts: npt.NDArray[np.float32]) -> StoredImportance:
        return StoredImportance(self._file, self._name, self._offset + 4 * first, self._dtype, shape, counts)


def stored_inputs(entries: Iterable[ImportanceEntry]) -> tuple[InputFile, ...]:
    """Return the files in which entries are stored, by which a run notices that one is overwritten."""
    places: dict[OpenFile, dict[str, tuple[int, int]]] = {}
    for entry in entries:
        if isinstance(entry, ResizedImportance):
            entry = entry.stored
        if isinstance(entry, StoredImportance):
            file, name, place = entry.place()
            places.setdefault(file, {})[f"the values of {name}"] = place
    return tuple(InputFile(file.path, found, file.fileno()) for file, found in places.items())


# Bounds on what a hostile file can ask for: several times what the largest models have.
MAX_ENTRIES = 1 << 16
MAX_COUNTS = 1 << 12
MAX_VALUES = 1 << 23
MAX_TEXT_BYTES = 1 << 12

SUMS, COUNTS = ".in_sum2", ".counts"
"""Ends of the names of the two tensors that the GGUF form has for every weight."""


def importance_file(source: ImportanceSource) -> ImportanceFile:
    """Return importances as a file holds them; a path is loaded, see `load`."""
    if isinstance(source, ImportanceFile):
        return source
    if isinstance(source, str | os.PathLike):
        return load(source)
    for name in source:
        if not isinstance(name, str):
            raise WrongType(f"importances: found {described(name)} as a tensor's name, expected str")
    return ImportanceFile({name: _entry_of(name, each) for name, each in source.items()})


def _entry_of(name: str, entry: ImportanceEntry | npt.NDArray[Any]) -> ImportanceEntry:
    """Return an entry, or that of an array, whose values are means already."""
    if isinstance(entry, ImportanceEntry):
        return entry
    weights = checked_weights(entry, name)
    if weights.ndim not in (1, 2) or not weights.size:
        raise BadImportance(f"{name}: importances {weights.shape}, expected (n_cols,) or (n_mats, n_cols)")
    rows = np.atleast_2d(weights)
    return Importance(rows, np.ones(len(rows), np.float32))


@checked
def load(path: str | os.PathLike[str]) -> ImportanceFile:
    """Read an importance matrix file in either form; values are read when they are used.

        matrix = imatrix.load("lite.imatrix.gguf")
        matrix.entries["blk.0.ffn_down.weight"].weights()

    raises  BadImportance when it is neither, contradicts itself or holds nothing;
            GGUFError when it is a damaged GGUF file
    """
    path = Path(path)
    try:
        # O_NONBLOCK: opening a pipe would wait for its writer.
        file = OpenFile(path, open_file(path, os.O_RDONLY | NO_WAIT))
        if not path.is_file():
            raise BadImportance(f"{path}: not a regular file")
        is_gguf = file.n_bytes >= 4 and file.read(0, 4, "the first bytes").tobytes() == b"GGUF"
        contents = _load_gguf(path) if is_gguf else _load_dat(file)
    except FileNotFoundError as error:
        raise MissingMatrix(f"{path}: can't be read (No such file or directory)") from error
    except OSError as error:
        raise BadImportance(f"{path}: can't be read ({error.strerror or error})") from error
    if not contents.entries:
        raise BadImportance(f"{path}: holds no importances")
    return contents


# The GGUF form


def _load_gguf(path: Path) -> ImportanceFile:
    with GGUFFile(path) as file:
        opened = OpenFile(path, os.dup(file.fileno()))
        names = {
            suffix: {name.removesuffix(suffix) for name in file.tensors if name.endswith(suffix)}
            for suffix in (SUMS, COUNTS)
        }
        if not names[SUMS]:
            raise BadImportance(f"{path}: not an importance matrix: GGUF without a tensor NAME{SUMS}")
        unpaired = sorted(names[SUMS] ^ names[COUNTS])
        if unpaired:
            name = shown(unpaired[0])
            raise BadImportance(f"{path}: {name}: found one of {SUMS} and {COUNTS}, expected both")
        if len(names[SUMS]) > MAX_ENTRIES:
            raise BadImportance(f"{path}: {len(names[SUMS])} entries, expected at most {MAX_ENTRIES}")
        return ImportanceFile(
            entries={name: _gguf_entry(file, opened, name) for name in sorted(names[SUMS])},
            datasets=_texts(file, keys.IMATRIX_DATASETS),
            chunk_count=_whole_number(file, keys.IMATRIX_CHUNK_COUNT),
            chunk_size=_whole_number(file, keys.IMATRIX_CHUNK_SIZE),
            path=path,
        )


def _texts(file: GGUFFile, key: str) -> tuple[str, ...]:
    found = file.get(key, ())
    if not isinstance(found, tuple | list) or not all(isinstance(text, str) for text in found):
        raise BadImportance(f"{file.path}: {key}: found {quoted(found)}, expected a list of names")
    return tuple(found)


def _whole_number(file: GGUFFile, key: str) -> int:
    found = file.get(key, 0)
    if not isinstance(found, int) or found < 0:
        raise BadImportance(f"{file.path}: {key}: found {quoted(found)}, expected a whole number")
    return found


def _gguf_entry(file: GGUFFile, opened: OpenFile, name: str) -> StoredImportance:
    for tensor in (name + SUMS, name + COUNTS):
        if file.tensors[tensor].type != F32:
            found = file.tensors[tensor].type.name
            raise BadImportance(f"{file.path}: {shown(tensor)}: found {found}, expected F32")
    n_values, n_counts = file.tensors[name + SUMS].n_elems, file.tensors[name + COUNTS].n_elems
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
    counts = opened.read(file.data_offset(name + COUNTS), 4 * n_counts, f"the counts of {name}")
    return StoredImportance(
        opened,
        name,
        file.data_offset(name + SUMS),
        order,
        (n_counts, n_values // n_counts),
        counts.view(order).astype(np.float32),
    )


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
