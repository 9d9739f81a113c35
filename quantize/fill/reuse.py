"""Reusing tensors of older files: what was made of the same data need not be made again.

An older file that has provenance (see provenance.py) says of each tensor what it was made of. A run that
would make a tensor of the same takes the blocks that are there: all that is left to do is to read the source
and digest it. Before they are taken, a sample of their rows is compared with what encoding them gives.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gguf_tools.edit.rewrite import copy_range
from gguf_tools.format.header import Endian
from gguf_tools.format.reader import GGUFFile
from gguf_tools.format.shards import GGUFSet, open_gguf
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.system.files import Closing
from quantize.fill.chunks import UNKNOWN, TensorChunks
from quantize.fill.encode import RowSources, encode_rows
from quantize.fill.executors import Executor, naming
from quantize.fill.filling import DigestSpec, FillJob
from quantize.fill.provenance import digest_importance, read_provenance, tensor_provenance
from quantize.fill.session import Session
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

    def is_sound(self, sources: RowSources) -> bool:
        """Whether a sample of its rows has the bytes that encoding them gives."""
        stored = GGUFTensor(self.file, self.info.name)
        for rows in sample_rows(self.info, sources.rows_per_weights().get(self.info.name)):
            expected = encode_rows(rows, self.info.type, sources)
            if not np.array_equal(stored.raw_rows(rows.start, rows.stop), expected):
                return False
        return True


class OldFiles(Closing):
    """The older files of a run; closes them.

    given   GGUF files, or for a split set any of its files
    endian  byte order of the output
    paths   of all files that are open
    usable  those of `given` that have provenance
    notes   why nothing of a file can be reused, a line for each

    raises  OSError or FormatError for a file that can't be opened
    """

    def __init__(self, given: Iterable[Path], endian: Endian) -> None:
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
                    self.notes.append(f"{path}: doesn't say what its tensors were made of; none is reused")
                elif file.endian != endian:
                    self.notes.append(f"{path}: is {file.endian} endian, unlike the output; none is reused")
                else:
                    self.usable.append(path)
                    self._numbers.append((path, file, numbers))
            self._closing = stack.pop_all()

    def close(self) -> None:
        self._closing.close()

    def find(self, info: TensorInfo) -> tuple[OldTensor, ...]:
        """Find the tensors of this name, shape and type that have provenance, in the order of the files."""
        return tuple(
            OldTensor(path, file, info, numbers[info.name])
            for path, file, numbers in self._numbers
            if info.name in numbers and file.tensor(info.name) == info
        )


def reuse_outlook(
    old_files: Iterable[Path], tensors: Sequence[TensorInfo], sources: RowSources, endian: Endian
) -> Iterator[str]:
    """Yield a line for each older file: how many tensors a run may take from it.

    Which of them were made of the same weights only a run can tell, because it reads them.
    """
    paths = list(old_files)
    with OldFiles(paths, endian) as old:
        yield from (f"note: {note}" for note in old.notes)
        made = [info for info in tensors if sources.is_encoded(info.name, info.type)]
        counts = Counter(path for info in made for path in {each.path for each in old.find(info)})
        for path in old.usable:
            yield (
                f"{path} may serve {counts[path]} of {len(tensors)} tensors: those of the same weights and"
                " importances, which a run finds out"
            )


class ReuseCandidate:
    """A tensor of the output that may be there already, while its source is being digested.

    info     as it is in the output
    old      where it may be
    missing  its chunks that are not done
    digests  of its chunks that are done or digested, by number
    """

    def __init__(self, old: tuple[OldTensor, ...], chunks: TensorChunks, done: Mapping[int, int]) -> None:
        self.info = chunks.info
        self.old = old
        self.missing = [task for task in chunks if task.number not in done]
        self.digests = {number: done.get(number, UNKNOWN) for number in chunks.numbers}
        self._n_missing = len(self.missing)

    def add(self, number: int, digest: int) -> bool:
        """Take the digest of a chunk, from one thread at a time; return whether that was the last."""
        self.digests[number] = digest
        self._n_missing -= 1
        return not self._n_missing

    def match(self, sources: RowSources) -> OldTensor | None:
        """Find the old tensor that was made of the same, if there is one; all chunks must be digested."""
        importance = digest_importance(sources.importances.get(self.info.name), self.info.type.name)
        source = sources.tensors[self.info.name].type
        number = tensor_provenance(self.info, source, self.digests.values(), importance)
        return next((old for old in self.old if old.number == number), None)


class Reuse:
    """The first pass of a run: it takes from older files what they have, and leaves the rest to be encoded.

    candidates  tensors that an older file may have, by name
    counts      how many tensors of each older file were taken
    damaged     tensors that would have been, but don't have the bytes that they should
    """

    def __init__(self, old: OldFiles, session: Session, job: FillJob, done: Mapping[int, int]) -> None:
        self.counts = Counter(dict.fromkeys(old.usable, 0))
        self.damaged: list[OldTensor] = []
        self.candidates: dict[str, ReuseCandidate] = {}
        self._old, self._session, self._sources = old, session, job.sources
        self._candidate_of: dict[int, ReuseCandidate] = {}
        self._lock = threading.Lock()
        for chunks in session.incomplete() if old.usable else ():
            info = chunks.info
            # A sample of a calibrated tensor can't be encoded again, so it is never taken.
            is_usable = self._sources.is_encoded(info.name, info.type) and not job.is_calibrated(info.name)
            tensors = old.find(info) if is_usable else ()
            if tensors:
                candidate = self.candidates[info.name] = ReuseCandidate(tensors, chunks, done)
                self._candidate_of.update(dict.fromkeys(chunks.numbers, candidate))

    def run(self, executor: Executor) -> None:
        """Digest the sources of all candidates, and take those that an older file has.

        raises  ExecutionError for the first chunk that fails
        """
        tasks = [task for candidate in self.candidates.values() for task in candidate.missing]
        if tasks:
            executor.run(tasks, DigestSpec(self._session.sources()), self._digested)

    def notes(self) -> tuple[str, ...]:
        """Return a line for each older file that was of no use, and for each tensor that is damaged there."""
        damaged = (f"{old.path}: {old.info.name} is damaged; it was made anew" for old in self.damaged)
        return (*self._old.notes, *damaged)

    def _digested(self, number: int, digest: int) -> None:
        candidate = self._candidate_of[number]
        with self._lock:
            is_complete = candidate.add(number, digest)
        if is_complete:
            with naming(candidate.missing[-1]):
                is_taken = self._take(candidate)
            for task in candidate.missing if is_taken else ():
                self._session.done(task.number, candidate.digests[task.number])

    def _take(self, candidate: ReuseCandidate) -> bool:
        """Copy the tensor from an older file that has what it would become, if there is one."""
        old = candidate.match(self._sources)
        if old is None:
            return False
        if not old.is_sound(self._sources):
            self.damaged.append(old)
            return False
        info = candidate.info
        writer = self._session.writer_of(info)
        copy_range(
            old.home.fileno(),
            old.home.data_offset(info.name),
            writer.fileno(),
            writer.layout.offset_of(info.name),
            info.n_bytes,
            f"{old.home.path}: tensor {info.name!r}",
            str(writer.partial),
        )
        with self._lock:
            self.counts[old.path] += 1
        return True
