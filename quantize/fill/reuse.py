"""Reusing tensors of older files: what was made of the same things need not be made again.

An older file that has provenance (see provenance.py) says of each tensor what it was made of. A run that
would make a tensor of the same takes the blocks that are there: all that is left to do is to read the source
and digest it. Whether those blocks are what they should be is tried on a sample of rows first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from gguf_tools.header import Endian
from gguf_tools.reader import GGUFFile
from gguf_tools.shards import GGUFSet, open_gguf
from gguf_tools.tensors import TensorInfo
from quantize.fill.chunks import ChunkTask
from quantize.fill.encode import FillJob, encode_chunk
from quantize.fill.provenance import UNKNOWN, digest_importance, read_provenance, tensor_provenance
from quantize.fill.sources import GGUFTensor
from quantize.fill.verify import sample_rows


@dataclass(frozen=True)
class OldTensor:
    """A tensor of an older file.

    path    of the file, as it was given
    number  its provenance
    """

    path: Path
    file: GGUFSet
    info: TensorInfo
    number: int

    @property
    def home(self) -> GGUFFile:
        """The one file, of a split set, that it is in."""
        return self.file.file_of(self.info.name)

    def is_sound(self, job: FillJob) -> bool:
        """Whether a sample of its rows has the bytes that encoding them gives."""
        stored = GGUFTensor(self.file, self.info.name)
        found = job.importances.get(self.info.name)
        for start, stop in sample_rows(self.info, found.rows_per_weights if found else None):
            task = ChunkTask(self.info.name, start, stop, 0, (stop - start) * self.info.row_bytes)
            if not np.array_equal(stored.raw_rows(start, stop), encode_chunk(task, self.info.type, job)):
                return False
        return True


class OldFiles:
    """The older files of a run; closes them.

    given   each a GGUF file, or any part of a split set
    endian  byte order of the output
    paths   of all files that are open
    usable  those of `given` that have provenance
    notes   why nothing of a file can be reused, a line for each

    raises  OSError or FormatError for a file that can't be opened
    """

    def __init__(self, given: Iterable[Path] = (), endian: Endian = "little") -> None:
        self.paths: list[Path] = []
        self.usable: list[Path] = []
        self.notes: list[str] = []
        self._numbers: list[tuple[Path, GGUFSet, Mapping[str, int]]] = []
        with ExitStack() as stack:
            for path in given:
                file = stack.enter_context(open_gguf(path))
                self.paths += file.paths
                numbers = read_provenance(file)
                if numbers is None:
                    self.notes.append(
                        f"{path}: says nothing of what its tensors were made of; none is reused"
                    )
                elif file.endian != endian:
                    self.notes.append(f"{path}: is {file.endian} endian, unlike the output; none is reused")
                else:
                    self.usable.append(path)
                    self._numbers.append((path, file, numbers))
            self._closing = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def find(self, info: TensorInfo) -> tuple[OldTensor, ...]:
        """Return the tensors of this name, shape and type that have provenance, in the order of the files."""
        return tuple(
            OldTensor(path, file, info, numbers[info.name])
            for path, file, numbers in self._numbers
            if info.name in numbers and file.tensor(info.name) == info
        )


class Candidate:
    """A tensor of the output that may be there already, while its source is being digested.

    info   as it is in the output
    old    where it may be
    tasks  its chunks that are not done
    """

    def __init__(
        self,
        info: TensorInfo,
        old: tuple[OldTensor, ...],
        chunks: Iterable[ChunkTask],
        done: Mapping[int, int],
    ) -> None:
        self.info = info
        self.old = old
        self.tasks: list[ChunkTask] = []
        self.digests: dict[int, int] = {}
        for task in chunks:
            self.digests[task.number] = done.get(task.number, UNKNOWN)
            if task.number not in done:
                self.tasks.append(task)
        self._n_missing = len(self.tasks)

    def add(self, number: int, digest: int) -> bool:
        """Take the digest of a chunk, from one thread at a time; returns whether that was the last."""
        self.digests[number] = digest
        self._n_missing -= 1
        return not self._n_missing

    def match(self, job: FillJob) -> OldTensor | None:
        """Return the old tensor that was made of the same, if there is one; all chunks must be digested."""
        importance = digest_importance(job.importances.get(self.info.name), self.info.type.name)
        source = job.sources[self.info.name].type
        number = tensor_provenance(self.info, source, self.digests.values(), importance)
        return next((old for old in self.old if old.number == number), None)
