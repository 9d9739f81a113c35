"""Filling: what a worker does with a chunk, and how its work is checked.

A worker encodes the rows of a chunk and writes their bytes at their place in the partial of an output. It
remembers nothing and decides nothing: the process that runs the job keeps the journal.

A worker may say that it has written a chunk, and the bytes are not there: its folder is another one under
the same name, or a page was lost on the way to a server. A file with such holes looks whole. So this
process reads rows back and encodes them itself: the ends of the first chunks of every worker before they
count as done, and a row of every chunk before a file gets its name. Files are opened anew each time,
because only then does the client of a network file system ask its server what there is.

The job of one run is its outputs, and all that goes into them. The bytes of a calibrated tensor depend on
the whole model and a text, not on its own rows alone. Whoever makes them (a `Calibrator`) has to see
activations, which is above this package. The fill hands it the chunks of those tensors, and keeps all else:
journal, resuming, publishing, verifying.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gguf_tools.files.inputs import AnyInput
from gguf_tools.files.partial_file import PartialFile
from gguf_tools.format.block_layouts import swap_bytes
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.header import Endian
from gguf_tools.format.shards import FileLayout
from gguf_tools.system.files import open_file, read_at
from quantize.fill.chunks import CHUNK_ELEMS, UNKNOWN, ChunkTable, ChunkTask, RowRange, RowsDigest
from quantize.fill.encode import RowSources, Target, digest_rows, encode_rows, encode_strips
from quantize.fill.executors import Done
from quantize.fill.sources import SourceSpec, SourceTensor
from quantize.importances.entries import ResolvedImportance


@dataclass(frozen=True)
class Output:
    """A file to be written: where, and every byte offset in it."""

    path: Path
    layout: FileLayout


class Calibrator(Protocol):
    """Makes the calibrated tensors of a run.

    names   of the tensors, as they are called in the output
    about   what decides their bytes besides sources, plan and importances, as JSON data made to be compared
    digest  of all that decides their bytes besides their own rows, shape and type; uint64, not 0
    """

    names: frozenset[str]
    about: Mapping[str, Any]
    digest: int

    def steps(
        self, tasks: Iterable[ChunkTask], partials: Mapping[int, Path], done: Done
    ) -> Generator[int, None, None]:
        """Write the chunks, in any order, and call `done` with the number and the digest of each one's rows.

        tasks     chunks of calibrated tensors that are not done
        partials  the file that each output grows in, by the output's number
        yields    how far it has come, ascending. Of several runs that share work, the one that is behind
                  should take the next step
        raises    ToolkitError
        """

    def damaged_row(self, tensor: str, path: Path) -> int | None:
        """Find the first row of a chunk whose bytes in the file are not those that were written, if any.

        path  of the file, whole, under whatever name
        """

    def lines(self) -> Iterable[str]:
        """Tell what a user should know of the calibration, once all is written."""


@dataclass(frozen=True)
class FillJob:
    """Job of one run: to fill a file, or the files of a split set.

    sources     where the rows of their tensors come from
    inputs      files that are being read, which no output may replace, and which must not change meanwhile
    calibrator  makes the calibrated tensors; None: there are none
    """

    outputs: tuple[Output, ...]
    sources: RowSources
    inputs: tuple[AnyInput, ...] = ()
    calibrator: Calibrator | None = None

    @property
    def layouts(self) -> Mapping[str, FileLayout]:
        """The layouts of the outputs, by their names."""
        return {output.path.name: output.layout for output in self.outputs}

    def table(self) -> ChunkTable:
        """Cut the outputs into chunks."""
        layouts = [output.layout for output in self.outputs]
        return ChunkTable.of(layouts, self.sources.rows_per_weights(), CHUNK_ELEMS)

    def is_calibrated(self, tensor: str) -> bool:
        return self.calibrator is not None and tensor in self.calibrator.names


_MOST_OF_COLUMNS = 4
"""Chunks that are read back of a tensor whose rows lie in columns of the source: one row takes all of it."""


def wrong_row(
    path: Path, task: ChunkTask, rows: Iterable[int], target: GGMLType, sources: RowSources, endian: Endian
) -> int | None:
    """Find the first of some rows of a chunk whose bytes in a file are not what encoding gives, if any.

    rows  of the tensor; where rows are interleaved, their groups are looked at
    """
    group = target.rows_interleaved
    row_bytes = task.n_bytes // len(task.rows)
    fd = open_file(path, os.O_RDONLY)
    try:
        for row in rows:
            start = task.rows.start + (row - task.rows.start) // group * group
            stop = min(start + group, task.rows.stop)
            expected = encode_rows(RowRange(task.rows.tensor, start, stop), target, sources)
            stored = swap_bytes(target, expected) if endian == "big" else expected
            offset = task.offset + (start - task.rows.start) * row_bytes
            if read_at(fd, stored.nbytes, offset) != np.ascontiguousarray(stored).tobytes():
                return start
    finally:
        os.close(fd)
    return None


def some_row(task: ChunkTask) -> int:
    """Pick a row of a chunk: another one in each chunk, but the same each time."""
    return task.rows.start + (task.number * 2654435761 + 1013904223) % 2**32 % len(task.rows)


def to_read_back(tasks: Sequence[ChunkTask], job: FillJob) -> Iterator[ChunkTask]:
    """Yield which of the chunks of one tensor are read back before its file gets its name."""
    if not tasks or job.is_calibrated(tasks[0].rows.tensor):
        return
    by_rows = job.sources.tensors[tasks[0].rows.tensor].by_rows
    yield from tasks[:: 1 if by_rows else -(-len(tasks) // _MOST_OF_COLUMNS)]


def wrong_chunks(
    path: Path,
    tasks: Iterable[tuple[ChunkTask, GGMLType]],
    sources: RowSources,
    endian: Endian,
    n_threads: int,
) -> list[ChunkTask]:
    """Find the chunks of a file of which a row is not what encoding gives.

    tasks  chunks that were written, and the types that they were encoded to
    """

    def look(each: tuple[ChunkTask, GGMLType]) -> ChunkTask | None:
        task, target = each
        row = wrong_row(path, task, [some_row(task)], target, sources, endian)
        return None if row is None else task

    with ThreadPoolExecutor(max(1, n_threads)) as pool:
        return [task for task in pool.map(look, tasks) if task is not None]


@dataclass(frozen=True)
class JobSpec:
    """How a process comes to fill the outputs of a run: paths and plan; picklable.

    sources      opens the tensors that rows come from
    importances  of the tensors that have some
    types        what each tensor becomes
    partials     the file that each output grows in, by the output's number
    run          the name of the run that the partials belong to
    endian       byte order of the outputs
    digests      digest the rows that are encoded, for provenance
    """

    sources: SourceSpec
    importances: Mapping[str, ResolvedImportance]
    types: Mapping[str, GGMLType]
    partials: Mapping[int, Path]
    run: bytes
    endian: Endian
    digests: bool

    @contextmanager
    def open(self) -> Iterator[Filler]:
        """Open sources and partials; raises OutputError for a partial that is gone, or not of this run."""
        with ExitStack() as stack:
            sources = stack.enter_context(self.sources.open())
            partials = {
                number: stack.enter_context(PartialFile(path, self.run))
                for number, path in self.partials.items()
            }
            yield Filler(self, RowSources(sources, self.importances), partials)

    def wrong_row(self, task: ChunkTask) -> int | None:
        """See `quantize.fill.executors.WorkerSpec`."""
        with self.sources.open() as tensors:
            sources, target = RowSources(tensors, self.importances), self.types[task.rows.tensor]
            ends = task.rows.start, task.rows.stop - 1
            return wrong_row(self.partials[task.output], task, ends, target, sources, self.endian)


class Filler:
    """A worker that fills partials; all threads of a process share one."""

    def __init__(self, spec: JobSpec, sources: RowSources, partials: Mapping[int, PartialFile]) -> None:
        self.spec, self.sources, self.partials = spec, sources, partials

    def run(self, task: ChunkTask) -> int:
        """Encode a chunk and write it; return the digest of its rows, UNKNOWN where they are copied."""
        return fill([(self, task)])

    def is_encoded(self, tensor: str) -> bool:
        """Whether the rows of a tensor are encoded, not copied as they are."""
        return self.sources.is_encoded(tensor, self.spec.types[tensor])

    def settle(self) -> None:
        """Bring what is written to the disk, and so to the server of a shared one; raises OutputError."""
        for partial in self.partials.values():
            partial.sync()


def fill(places: Sequence[tuple[Filler, ChunkTask]]) -> int:
    """Encode rows once, and write them to each place; return their digest, UNKNOWN where nobody wants it.

    places  fillers, and a chunk of the same rows for each; all encode them, or there is only one
    """
    rows = places[0][1].rows
    digests = any(filler.spec.digests and filler.is_encoded(rows.tensor) for filler, _ in places)
    digest = RowsDigest() if digests else None
    targets = [
        Target(filler.spec.types[rows.tensor], filler.sources, filler.spec.endian) for filler, _ in places
    ]
    offsets = [task.offset for _, task in places]
    for encoded in encode_strips(rows, targets, digest):
        for index, ((filler, task), data) in enumerate(zip(places, encoded, strict=True)):
            filler.partials[task.output].write(offsets[index], data.data)
            offsets[index] += data.size
    return UNKNOWN if digest is None else digest.value()


@dataclass(frozen=True)
class DigestSpec:
    """How a process comes to digest the rows of a run's sources, without writing anything; picklable."""

    sources: SourceSpec

    @contextmanager
    def open(self) -> Iterator[Digester]:
        with self.sources.open() as sources:
            yield Digester(sources)

    def wrong_row(self, task: ChunkTask) -> int | None:
        """Nothing is written, so nothing is wrong."""
        return None


class Digester:
    """A worker that reads rows and digests them."""

    def __init__(self, sources: Mapping[str, SourceTensor]) -> None:
        self._sources = sources

    def run(self, task: ChunkTask) -> int:
        """Digest a chunk's rows."""
        return digest_rows(task.rows, self._sources[task.rows.tensor])

    def settle(self) -> None:
        """Nothing is written."""
