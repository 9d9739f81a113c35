"""Stored importances: entries of a file, read when they are asked for and not kept.

A model with 256 experts a layer has a gigabyte of importances, and a chunk of its weights needs one row of
them: 28 KB. They are read with `pread`, not mapped: pages of a map count as this process's memory, and a file
that another program shortens meanwhile is an error here and a crash there. The file stays open as long as one
of its entries is in use, so it may be replaced or deleted meanwhile. A run that fills outputs notices when it
is overwritten in place; see `stored_inputs`.
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

from gguf_tools.errors import BadImportance
from gguf_tools.files.inputs import InputFile
from gguf_tools.system.files import open_file, read_into
from quantize.importances.entries import ImportanceEntry


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
        left = data.data
        while left:
            try:
                n_read = read_into(self._fd, left, offset)
            except OSError as error:
                raise BadImportance(f"{self.path}: {what} can't be read ({error.strerror})") from error
            if not n_read:
                raise BadImportance(
                    f"{self.path}: {what}: {len(left)} of {n_bytes} bytes are missing;"
                    " the file has become shorter since it was opened"
                )
            left = left[n_read:]
            offset += n_read
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

    def row(self, index: int) -> StoredImportance:
        n_cols = self._shape[1]
        return self._part(index * n_cols, (1, n_cols), self.counts[index : index + 1])

    def in_rows(self, counts: npt.NDArray[np.float32]) -> StoredImportance:
        return self._part(0, (len(counts), self.n_values // len(counts)), counts)

    def place(self) -> tuple[OpenFile, str, tuple[int, int]]:
        """Return the file, the entry's name, and where its values are: offset and number of bytes."""
        return self._file, self._name, (self._offset, 4 * prod(self._shape))

    def _part(self, first: int, shape: tuple[int, int], counts: npt.NDArray[np.float32]) -> StoredImportance:
        """Return values of this entry, from number `first` on, as an entry of their own."""
        return StoredImportance(self._file, self._name, self._offset + 4 * first, self._dtype, shape, counts)


def stored_inputs(entries: Iterable[ImportanceEntry]) -> tuple[InputFile, ...]:
    """Return the files in which entries are stored, by which a run notices that one is overwritten."""
    places: dict[OpenFile, dict[str, tuple[int, int]]] = {}
    for entry in entries:
        if isinstance(entry, StoredImportance):
            file, name, place = entry.place()
            places.setdefault(file, {})[f"the values of {name}"] = place
    return tuple(InputFile(file.path, found, file.fileno()) for file, found in places.items())
