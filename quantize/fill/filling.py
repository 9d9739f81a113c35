"""Filling: what a worker does with a chunk, and how a process comes to be a worker.

A worker encodes the rows of a chunk and writes their bytes at their place in the partial of an output. It
remembers nothing and decides nothing: the process that runs the job keeps the journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gguf_tools.files.partial_file import PartialFile
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.header import Endian
from quantize.fill.chunks import ChunkTask
from quantize.fill.digests import UNKNOWN, RowsDigest
from quantize.fill.encode import FillJob, Target, digest_rows, encode_strips
from quantize.fill.read_back import ends, wrong_row
from quantize.fill.sources import SourceSpec, SourceTensor
from quantize.importances.entries import ResolvedImportance


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
            yield Filler(self, FillJob(sources, self.importances), partials)

    def wrong_row(self, task: ChunkTask) -> int | None:
        """See `quantize.fill.executors.WorkerSpec`."""
        with self.sources.open() as sources:
            job, target = FillJob(sources, self.importances), self.types[task.rows.tensor]
            return wrong_row(self.partials[task.output], task, ends(task), target, job, self.endian)


class Filler:
    """A worker that fills partials; all threads of a process share one."""

    def __init__(self, spec: JobSpec, job: FillJob, partials: Mapping[int, PartialFile]) -> None:
        self.spec, self.job, self.partials = spec, job, partials

    def run(self, task: ChunkTask) -> int:
        """Encode a chunk and write it; return the digest of its rows, UNKNOWN where they are copied."""
        target = self.target(task.rows.tensor)
        wants_digest = self.spec.digests and self.job.is_encoded(task.rows.tensor, target.type)
        digest = RowsDigest() if wants_digest else None
        partial = self.partials[task.output]
        offset = task.offset
        for (data,) in encode_strips(task.rows, [target], digest):
            partial.write(offset, data.data)
            offset += data.size
        return UNKNOWN if digest is None else digest.value()

    def target(self, tensor: str) -> Target:
        """Return the target of the rows of a tensor."""
        return Target(self.spec.types[tensor], self.job, self.spec.endian)

    def settle(self) -> None:
        """Bring what is written to the disk, and so to the server of a shared one; raises OutputError."""
        for partial in self.partials.values():
            partial.sync()


@dataclass(frozen=True)
class DigestSpec:
    """How a process comes to digest the rows of a run's sources, without writing anything; picklable."""

    sources: SourceSpec

    @contextmanager
    def open(self) -> Iterator[Digester]:
        with self.sources.open() as sources:
            yield Digester(sources)

    def wrong_row(self, task: ChunkTask) -> int | None:
        """Return None: nothing is written."""
        return None


class Digester:
    """A worker that reads rows and digests them."""

    def __init__(self, sources: Mapping[str, SourceTensor]) -> None:
        self._sources = sources

    def run(self, task: ChunkTask) -> int:
        """Return the digest of a chunk's rows."""
        return digest_rows(task.rows, self._sources[task.rows.tensor])

    def settle(self) -> None:
        """Nothing is written."""
