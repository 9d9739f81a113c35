"""Hidden states of all tokens, (n_rows, n_cols), in memory or, when they take too much of it, in a file.

Several threads may work on different rows at the same time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import pad

from gguf_tools.errors import OutputError
from gguf_tools.system import files
from gguf_tools.system.files import open_own
from imatrix.forward.device import to_bytes, to_numpy
from imatrix.forward.kernels import add_weighted

_COPY_BYTES = 32 << 20


class Rows(Protocol):
    """Rows that can be read by number."""

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the rows with these ascending numbers."""


class States(Rows, Protocol):
    """Rows that can be read and written by number."""

    n_rows: int
    n_cols: int

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop`; the caller must not change them."""

    def write(self, start: int, rows: torch.Tensor) -> None: ...

    def add(self, numbers: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> None:
        """Add `rows`, each times its weight, to the rows of float32 with these ascending numbers.

        weights  (n_rows,), or (n_rows, n_strands) where rows have several strands of `rows` side by side
        """


class MemoryStates:
    """Rows in memory."""

    def __init__(self, n_rows: int, n_cols: int, dtype: torch.dtype = torch.float32) -> None:
        self.n_rows, self.n_cols = n_rows, n_cols
        self._rows = torch.empty((n_rows, n_cols), dtype=dtype)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._rows[start:stop]

    def write(self, start: int, rows: torch.Tensor) -> None:
        self._rows[start : start + len(rows)] = rows

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._rows.index_select(0, numbers)

    def add(self, numbers: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> None:
        add_weighted(self._rows, numbers, rows, weights)


class FileStates:
    """Rows in a file, which is read and written. Pages of a memory map would count as memory.

    create  make the file if it is not there, and give it its size
    raises  OutputError when the file can't be read or written, or is a link
    """

    def __init__(
        self,
        path: Path,
        n_rows: int,
        n_cols: int,
        dtype: torch.dtype = torch.float32,
        *,
        create: bool = True,
    ) -> None:
        self.path, self.n_rows, self.n_cols, self._dtype = path, n_rows, n_cols, dtype
        self._row_bytes = dtype.itemsize * n_cols
        with OutputError.from_os(f"{path}: can't be written"):
            self._fd = open_own(path, os.O_RDWR | (os.O_CREAT if create else 0))
            if create:
                os.ftruncate(self._fd, n_rows * self._row_bytes)

    def close(self) -> None:
        os.close(self._fd)

    def sync(self) -> None:
        files.sync(self._fd)

    def read(self, start: int, stop: int) -> torch.Tensor:
        out = torch.empty((stop - start, self.n_cols), dtype=self._dtype)
        self._read_into(out, start)
        return out

    def write(self, start: int, rows: torch.Tensor) -> None:
        with OutputError.from_os(f"{self.path}: can't be written"):
            files.write_all(self._fd, to_bytes(rows), start * self._row_bytes)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(numbers), self.n_cols), dtype=self._dtype)
        for at, start, count in _runs(numbers):
            self._read_into(out[at : at + count], start)
        return out

    def add(self, numbers: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> None:
        total = self.rows(numbers)
        add_weighted(total, torch.arange(len(total)), rows, weights)
        for at, start, count in _runs(numbers):
            self.write(start, total[at : at + count])

    def _read_into(self, out: torch.Tensor, start: int) -> None:
        view = to_bytes(out)
        if files.fill(self._fd, view, start * self._row_bytes) < len(view):
            raise OutputError(f"{self.path}: shorter than it was written; was it changed meanwhile?")


def copy(source: States, target: States) -> None:
    """Copy all rows."""
    step = max(1, _COPY_BYTES // (4 * source.n_cols))
    for start in range(0, source.n_rows, step):
        target.write(start, source.read(start, min(source.n_rows, start + step)))


def write_first(states: States, start: int, rows: torch.Tensor) -> None:
    """Write rows that may have fewer columns than there are; those behind them are 0."""
    n_behind = states.n_cols - rows.shape[1]
    states.write(start, pad(rows, (0, n_behind)) if n_behind else rows)


def clear(states: States) -> None:
    """Fill all rows, float32, with zeros."""
    step = max(1, _COPY_BYTES // (4 * states.n_cols))
    for start in range(0, states.n_rows, step):
        states.write(start, torch.zeros((min(step, states.n_rows - start), states.n_cols)))


def _runs(numbers: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (index of the first, its number, length) for every run of consecutive numbers.

    >>> _runs(torch.tensor([3, 4, 7]))
    [(0, 3, 2), (2, 7, 1)]
    """
    values = to_numpy(numbers)
    starts = np.flatnonzero(np.diff(values, prepend=-2) != 1)
    counts = np.diff(starts, append=len(values))
    return [(int(at), int(values[at]), int(count)) for at, count in zip(starts, counts, strict=True)]
