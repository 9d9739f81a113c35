"""Outputs: filled in any order, each published as soon as it is whole, gone on with after an interruption.

Beside the first output lies a journal of the chunks that are done (see gguf_tools/journal.py). A run that
fails or is killed leaves it and the partials; the same run again, and no other, goes on from there.

Where the layout has a place for provenance (see provenance.py), it is filled in when all chunks of all
outputs are done, so the first output, which has it, comes last.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from gguf_tools.errors import BadTensor, ToolkitError
from gguf_tools.journal import Journal, journal_path
from gguf_tools.layout import FileLayout
from gguf_tools.writer import PARTIAL_SUFFIX, GGUFWriter, refuse_inputs
from quantize.fill.chunks import tensor_chunks
from quantize.fill.encode import FillJob
from quantize.fill.executors import make_executor
from quantize.fill.filling import Filling, Part, Progress
from quantize.fill.fingerprint import describe_run
from quantize.fill.precompile import compile_all
from quantize.fill.provenance import (
    PROVENANCE_KEY,
    UNKNOWN,
    digest_importance,
    provenance_value,
    tensor_provenance,
)
from quantize.fill.reuse import OldFiles, OldTensor
from quantize.fill.verify import Verification, together, verify_output


@dataclass(frozen=True)
class Output:
    """A file to be written: where, and every byte offset in it."""

    path: Path
    layout: FileLayout


@dataclass(frozen=True)
class Written:
    """What `write_outputs` has done.

    n_chunks      of all outputs
    n_resumed     of these, how many an earlier run had done
    reused        how many tensors came from which older file
    notes         what a user should know about the older files
    verification  what a check of the outputs found, None without one
    """

    n_chunks: int
    n_resumed: int
    reused: Mapping[Path, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    verification: Verification | None = None


def write_outputs(
    outputs: Iterable[Output],
    job: FillJob,
    n_threads: int,
    progress: Progress,
    inputs: Iterable[Path],
    *,
    restart: bool = False,
    reuse: Iterable[Path] = (),
    verify: bool = False,
) -> Written:
    """Fill all `outputs` and publish each when it is whole.

    inputs   files that are being read, which no output may replace
    restart  forget what an interrupted run has left
    reuse    older files that may have some of the tensors, see reuse.py; an output may replace them
    verify   check every output before it is published, see verify.py
    raises   ExecutionError for the first chunk that fails, OutputError for a file that can't be written, and
             for what another run has left; what is done stays for the next run
    """
    outputs, inputs, reuse = tuple(outputs), tuple(inputs), tuple(reuse)
    refuse_inputs(journal_path(outputs[0].path), inputs)
    layouts = {output.path.name: output.layout for output in outputs}
    about = describe_run(layouts, job, inputs)
    with ExitStack() as stack:
        old = stack.enter_context(OldFiles(reuse, outputs[0].layout.endian))
        for output in outputs:
            refuse_inputs(output.path.with_name(output.path.name + PARTIAL_SUFFIX), old.paths)
        journal = stack.enter_context(Journal(outputs[0].path, about, restart=restart))
        session = _Session(outputs, job, journal, verify=verify)
        try:
            session.open_parts(inputs, stack)
            n_resumed = len(journal.done)
            if session.n_bytes_published:
                progress(session.n_bytes_published)
            filling = Filling(
                session.parts, job, progress, journal, session.finish, digests=session.has_provenance, old=old
            )
            compile_all(filling.encodings(), n_threads)
            filling.run(make_executor(n_threads))
            session.finish_provenance()
        except BaseException as error:
            session.keep(error)
            raise
        journal.remove()
    return Written(
        session.n_chunks,
        n_resumed,
        reused=filling.reused,
        notes=(*old.notes, *(_damage_note(tensor) for tensor in filling.damaged)),
        verification=together(session.checked) if verify else None,
    )


class _Session:
    """One session of a run: the outputs that it opens, and how each of them ends.

    parts              the outputs that have no name yet
    n_bytes_published  how many bytes of tensors the others have
    has_provenance     whether the first output has a place for provenance
    checked            what verifying has found so far
    """

    def __init__(self, outputs: Sequence[Output], job: FillJob, journal: Journal, *, verify: bool) -> None:
        self.parts: list[Part] = []
        self.n_bytes_published = 0
        self.has_provenance = PROVENANCE_KEY in outputs[0].layout.metadata
        self.checked: list[Verification] = []
        self._outputs = outputs
        self._job = job
        self._journal = journal
        self._verify = verify
        self._chunks_of = _number_chunks(outputs, job)

    @property
    def n_chunks(self) -> int:
        """Of all outputs."""
        return self._chunks_of[-1].all.stop

    def open_parts(self, inputs: Iterable[Path], stack: ExitStack) -> None:
        """Open the partials; where one isn't there, its chunks are not done either."""
        journal = self._journal
        for number, (output, chunks) in enumerate(zip(self._outputs, self._chunks_of, strict=True)):
            inode = journal.published.get(number)
            if _has_its_name(output, inode):
                self.n_bytes_published += sum(info.n_bytes for info in output.layout.tensors)
                continue
            whole = inode if all(chunk in journal.done for chunk in chunks.all) else None
            writer = GGUFWriter(output.path, output.layout, inputs, run=journal.run, whole=whole)
            stack.enter_context(writer)
            self.parts.append(Part(number, writer, chunks.all))
            if not writer.resumed:
                journal.forget(chunks.all)
                writer.mark()

    def finish(self, part: Part) -> None:
        """Publish a part that is whole; the one with the provenance has to wait for all others."""
        if part.number or not self.has_provenance:
            self._publish(part)

    def finish_provenance(self) -> None:
        """Fill in the provenance, now that all chunks are done, and publish the part that has it."""
        if self.has_provenance and self.parts and not self.parts[0].number:
            numbers = _provenance(self._outputs, self._chunks_of, self._job, self._journal.done)
            self.parts[0].writer.layout = _with_provenance(self._outputs[0].layout, numbers)
            self._publish(self.parts[0])

    def _publish(self, part: Part) -> None:
        journal, writer = self._journal, part.writer
        journal.sync(other.writer.fileno() for other in self.parts if other.writer.is_open)
        journal.finish_output(part.number, os.fstat(writer.fileno()).st_ino)
        if self._verify:
            self.checked.append(_check(writer, self._job, journal, self._chunks_of[part.number]))
        writer.publish()

    def keep(self, error: BaseException) -> None:
        """Leave what is done for the next session, and say so; if nothing is, leave nothing."""
        if self._journal.done:
            done = f"{len(self._journal.done)} of {self.n_chunks} chunks are done and kept"
            error.add_note(f"{done}: the same command goes on from there")
            return
        for part in self.parts:
            part.writer.discard()
        self._journal.remove()


@dataclass(frozen=True)
class _Chunks:
    """The numbers of the chunks of an output: of all its tensors, and of each."""

    all: range
    of: Mapping[str, range]


def _number_chunks(outputs: Sequence[Output], job: FillJob) -> list[_Chunks]:
    """Return the numbers of the chunks of each output, counted through all of them."""
    spans = job.rows_per_weights()
    found = []
    stop = 0
    for output in outputs:
        start = stop
        of = {}
        for info in output.layout.tensors:
            n_chunks = sum(1 for _ in tensor_chunks(info, 0, spans.get(info.name)))
            of[info.name] = range(stop, stop + n_chunks)
            stop += n_chunks
        found.append(_Chunks(range(start, stop), of))
    return found


def _provenance(
    outputs: Sequence[Output], chunks_of: Sequence[_Chunks], job: FillJob, done: Mapping[int, int]
) -> Iterator[int]:
    """Yield the provenance of every tensor of all outputs, from the digests of their chunks."""
    for output, chunks in zip(outputs, chunks_of, strict=True):
        for info in output.layout.tensors:
            source = job.sources[info.name].type
            if source == info.type:
                yield UNKNOWN
            else:
                importance = digest_importance(job.importances.get(info.name), info.type.name)
                digests = (done[number] for number in chunks.of[info.name])
                yield tensor_provenance(info, source, digests, importance)


def _with_provenance(layout: FileLayout, numbers: Iterable[int]) -> FileLayout:
    """Return `layout` with these numbers in their place."""
    metadata = {**layout.metadata, PROVENANCE_KEY: provenance_value(numbers)}
    filled = FileLayout.of(metadata, layout.tensors, endian=layout.endian, version=layout.version)
    assert filled.offsets == layout.offsets, "the place for provenance has another size"
    return filled


def _check(writer: GGUFWriter, job: FillJob, journal: Journal, chunks: _Chunks) -> Verification:
    """Check a whole output before it gets its name; a tensor that fails is to be done again."""
    writer.seal()
    try:
        return verify_output(writer.partial, writer.layout, job)
    except ToolkitError as error:
        writer.mark()
        if isinstance(error, BadTensor):
            journal.forget(chunks.of[error.tensor])
        raise


def _damage_note(tensor: OldTensor) -> str:
    return f"{tensor.path}: {tensor.info.name} is damaged; it was made anew"


def _has_its_name(output: Output, inode: int | None) -> bool:
    """Whether the file that an earlier session sealed with this inode is in its place."""
    try:
        found = os.stat(output.path)
    except OSError:
        return False
    return found.st_ino == inode and found.st_size == output.layout.total_bytes
