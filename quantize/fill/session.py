"""A session of a run: what is done of it, from partials to files with names.

A `ChunkTable` says what is to be done; a session knows what of that is done. It opens the partials, remembers
every chunk in the journal, and publishes each output as soon as it is whole.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from gguf_tools.errors import BadTensor, ChangedInput, OutputError, ToolkitError
from gguf_tools.files.inputs import InputWatch
from gguf_tools.files.journal import Journal
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.shards import TensorInfo
from gguf_tools.progress import Advance
from gguf_tools.system.files import IS_HELD_OPEN, file_number
from quantize.fill.chunks import UNKNOWN, ChunkTask, TensorChunks
from quantize.fill.executors import naming
from quantize.fill.filling import FillJob, JobSpec, Output, to_read_back, wrong_chunks
from quantize.fill.provenance import (
    PROVENANCE_KEY,
    digest_weighting,
    provenance_value,
    tensor_provenance,
    with_provenance,
)
from quantize.fill.sources import OpenSources
from quantize.fill.verify import Verification, verify_output


class Session:
    """One session of a run that may have been interrupted before. `done` may be called from any thread.

    job       what the run fills
    journal   what earlier sessions have done, and this one does
    inputs    must not change before an output gets its name
    advance   told of every chunk, and at the start of what is done already
    verify    check every output before it gets its name
    read_back how many threads read a row of every chunk back before that, where other processes have
              written them; 0: none, and nothing is read back
    checked   what verifying has found so far
    """

    def __init__(
        self,
        job: FillJob,
        journal: Journal,
        inputs: InputWatch,
        advance: Advance,
        *,
        verify: bool,
        read_back: int = 0,
    ) -> None:
        self.checked: list[Verification] = []
        self._job, self._table = job, job.table()
        self._journal = journal
        self._inputs = inputs
        self._advance = advance
        self._verify, self._read_back = verify, read_back
        # Where nothing is encoded, what is laid out is said by the front, and stays.
        infos = [chunks.info for chunks in self._table.tensors.values()]
        makes_some = any(job.sources.is_encoded(info.name, info.type) for info in infos)
        self._has_provenance = makes_some and PROVENANCE_KEY in job.outputs[0].layout.metadata
        self._open: dict[int, GGUFWriter] = {}  # the outputs that have no name yet, by number
        self._n_left: dict[int, int] = {}
        self._counting = threading.Lock()
        self._closing = threading.Lock()  # no file is closed while it is being synced

    @property
    def n_chunks(self) -> int:
        return self._table.n_chunks

    def open_outputs(self, stack: ExitStack) -> None:
        """Open the partials; where one isn't there, its chunks are not done either.

        stack  closes the partials
        """
        journal = self._journal
        n_bytes = 0
        for number, (output, chunks) in enumerate(zip(self._job.outputs, self._table.outputs, strict=True)):
            inode = journal.published.get(number)
            if _has_its_name(output, inode):
                n_bytes += sum(info.n_bytes for info in output.layout.tensors)
                continue
            whole = inode if all(chunk in journal.done for chunk in chunks) else None
            writer = stack.enter_context(
                GGUFWriter(
                    output.path,
                    output.layout,
                    self._job.inputs,
                    run=journal.run,
                    whole=whole,
                    found=journal.found,
                    sealed=journal.sealed,
                )
            )
            self._open[number] = writer
            if not writer.resumed:
                journal.forget(chunks)
                writer.mark()
            done = [chunk for chunk in chunks if chunk in journal.done]
            self._n_left[number] = len(chunks) - len(done)
            n_bytes += sum(self._table.task(chunk).n_bytes for chunk in done)
        if n_bytes:
            self._advance(n_bytes)

    def sources(self) -> OpenSources:
        """The sources of the job, as any process can open them."""
        return OpenSources(self._job.sources.tensors, self._job.sources.spec)

    def spec(self) -> JobSpec:
        """Make the spec by which a worker fills the outputs that lack chunks."""
        writers = {number: writer for number, writer in self._open.items() if self._n_left[number]}
        return JobSpec(
            sources=self.sources(),
            importances=self._job.sources.importances,
            types={name: chunks.info.type for name, chunks in self._table.tensors.items()},
            partials={number: writer.partial for number, writer in writers.items()},
            run=self._journal.run,
            endian=self._job.outputs[0].layout.endian,
            digests=self._has_provenance,
        )

    def partials(self) -> dict[int, Path]:
        """The places of the outputs that have no name yet, even where no chunk is missing."""
        return {number: writer.partial for number, writer in self._open.items() if writer.is_open}

    def incomplete(self) -> Iterator[TensorChunks]:
        """Yield the tensors of the outputs that lack chunks."""
        for chunks in self._table.tensors.values():
            if self._n_left.get(chunks.output):
                yield chunks

    def missing(self) -> Iterator[ChunkTask]:
        """Yield the chunks that are not done."""
        for output in self._open:
            for number in self._table.outputs[output]:
                if number not in self._journal.done:
                    yield self._table.task(number)

    def is_encoded(self, task: ChunkTask) -> bool:
        """Whether the rows of a chunk are encoded, not copied as they are."""
        tensor = task.rows.tensor
        return self._job.sources.is_encoded(tensor, self._table.tensors[tensor].info.type)

    def writer_of(self, info: TensorInfo) -> GGUFWriter:
        """The writer of the output that a tensor goes into."""
        return self._open[self._table.tensors[info.name].output]

    def done(self, number: int, digest: int) -> None:
        """Remember that the bytes of a chunk are written; publish its output if that was the last.

        raises  ExecutionError for a failure of journal or output, and what `advance` raises
        """
        task = self._table.task(number)
        with naming(task):
            self._open[task.output].begin_writeback(task.offset, task.n_bytes)
            self._journal.finish(number, digest)
            if self._journal.is_sync_due():
                with self._closing:
                    self._sync()
        self._advance(task.n_bytes)
        with self._counting:
            self._n_left[task.output] -= 1
            is_whole = not self._n_left[task.output]
        if is_whole:
            with naming(task), self._closing:
                self._finish(task.output)

    def publish_whole(self) -> None:
        """Publish the outputs that an earlier session has filled."""
        for output in self._open:
            if not self._n_left[output]:
                self._finish(output)

    def finish(self) -> None:
        """Publish what is whole and has no name yet; first fill in the provenance, now that all is done."""
        assert not any(self._n_left.values()), "an output is not complete"
        for output, writer in self._open.items():
            if writer.is_open and not self._has_to_wait(output):
                self._publish(output)
        first = self._open.get(0)
        if self._has_provenance and first is not None:
            layout = self._job.outputs[0].layout
            first.layout = with_provenance(layout, provenance_value(self._provenance()))
            assert first.layout.offsets == layout.offsets, "the place for provenance has another size"
            self._publish(0)

    def keep(self, error: BaseException) -> None:
        """Leave what is done for the next session, and say so; if nothing is, leave nothing."""
        with suppress(ToolkitError):  # which is about what was done, and not why the session ends
            self._sync()
        if self._journal.done:
            done = f"{len(self._journal.done)} of {self._table.n_chunks} chunks are done and kept"
            error.add_note(f"{done}: the same command resumes from there")
            return
        for writer in self._open.values():
            writer.discard()
        self._journal.remove()

    def _finish(self, output: int) -> None:
        """Publish an output that is whole, unless it has to be the last, or workers still hold it open."""
        if not self._has_to_wait(output) and not IS_HELD_OPEN:
            self._publish(output)

    def _has_to_wait(self, output: int) -> bool:
        """Whether an output has the provenance, which is known when all others are whole."""
        return self._has_provenance and not output

    def _publish(self, output: int) -> None:
        writer = self._open[output]
        self._sync()
        if self._read_back:
            self._refuse_holes(output)
        self._journal.finish_output(output, file_number(os.fstat(writer.fileno())))
        if self._verify:
            self.checked.append(self._check(writer))
        writer.publish()

    def _refuse_holes(self, output: int) -> None:
        """Raise OutputError for chunks whose bytes are not there, after forgetting that they are done."""
        writer, job = self._open[output], self._job
        tasks = [
            (task, chunks.info.type)
            for chunks in self._table.tensors.values()
            if chunks.output == output
            for task in to_read_back(list(chunks), job)
        ]
        wrong = wrong_chunks(writer.partial, tasks, job.sources, writer.layout.endian, self._read_back)
        for task in wrong:
            self._journal.forget(range(task.number, task.number + 1))
        if wrong:
            raise OutputError(
                f"{writer.partial}: {len(wrong)} of the {len(tasks)} chunks that were read back are not what"
                f" workers were to write, the first {wrong[0]}; they will be written again (do all workers"
                " see the same files?)"
            )

    def _sync(self) -> None:
        """Make sure of the chunks so far: that they are on the disk, and were made of the right inputs."""
        try:
            self._journal.sync(self._open_files())
        except ChangedInput:
            self._journal.forget_unsynced()
            raise

    def _open_files(self) -> Iterator[int]:
        """Yield the descriptors of the partials, after a look at the inputs.

        The journal asks for them when it has counted the chunks that it is to make sure of.
        """
        self._inputs.refuse_changed()
        for writer in self._open.values():
            if writer.is_open:
                yield writer.fileno()

    def _check(self, writer: GGUFWriter) -> Verification:
        """Check a whole output before it gets its name; a tensor that fails is to be done again."""
        writer.seal()
        try:
            return verify_output(writer.partial, writer.layout, self._job)
        except ToolkitError as error:
            writer.mark()
            if isinstance(error, BadTensor):
                self._journal.forget(self._table.tensors[error.tensor].numbers)
            raise

    def _provenance(self) -> Iterator[int]:
        """Yield the provenance of every tensor of all outputs, from the digests of their chunks."""
        job, sources, done = self._job, self._job.sources, self._journal.done
        for name, chunks in self._table.tensors.items():
            if sources.is_encoded(name, chunks.info.type):
                importance = digest_weighting(job, name, chunks.info.type.name)
                digests = (done[number] for number in chunks.numbers)
                yield tensor_provenance(chunks.info, sources.tensors[name].type, digests, importance)
            else:
                yield UNKNOWN


def _has_its_name(output: Output, inode: int | None) -> bool:
    """Whether the file that an earlier session sealed with this inode is in its place."""
    try:
        status = os.stat(output.path)
    except OSError:
        return False
    return file_number(status) == inode and status.st_size == output.layout.total_bytes
