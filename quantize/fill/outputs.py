"""Outputs: filled in any order, each published as soon as it is whole, resumed after an interruption.

Beside the first output lies a journal of the chunks that are done (see files/journal.py). A run that
fails or is killed leaves it and the partials; the same run again, and no other, resumes from there.

Where the layout has a place for provenance (see provenance.py), it is filled in when all chunks of all
outputs are done, so the first output, which has it, comes last.

Several sets of outputs can be made from one source: every row is read and decoded once, and encoded for
each set. Each set keeps its own journal, partials and provenance, so each can be resumed, reused and verified
as if it were made alone, and its bytes are the same. What they share is a walk over the source: chunks of the
same rows become one task.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gguf_tools.cluster.job import remove_job
from gguf_tools.files.inputs import AnyInput, InputWatch
from gguf_tools.files.journal import Journal, journal_path
from gguf_tools.files.partial_file import PARTIAL_SUFFIX, refuse_inputs
from gguf_tools.progress import Progress, no_progress
from gguf_tools.system import files
from gguf_tools.system.files import Moved
from quantize.fill.chunks import CHUNK_ELEMS, UNKNOWN, ChunkTable, ChunkTask, RowRange, RowsDigest
from quantize.fill.encode import FillJob, encode_strips
from quantize.fill.executors import Executor, make_executor
from quantize.fill.filling import Filler, JobSpec
from quantize.fill.options import FillOptions
from quantize.fill.precompile import Encoding, compile_all
from quantize.fill.provenance import describe_run
from quantize.fill.reuse import OldFiles, OldTensor, Reuse
from quantize.fill.session import Output, Session
from quantize.fill.verify import Verification, merge_verifications
from quantize.importances.files import stored_inputs


@dataclass(frozen=True)
class Member:
    """A chunk of one of the sets: the number of the set, and the chunk."""

    set: int
    task: ChunkTask


@dataclass(frozen=True)
class SharedSpec:
    """How a process comes to fill chunks of several sets; picklable.

    specs    of the sets
    members  the chunks of the same rows, by the number of the task that stands for them
    """

    specs: tuple[JobSpec, ...]
    members: tuple[tuple[Member, ...], ...]

    @contextmanager
    def open(self) -> Iterator[SharedFiller]:
        with ExitStack() as stack:
            fillers = [stack.enter_context(spec.open()) for spec in self.specs]
            yield SharedFiller(fillers, self.members)

    def wrong_row(self, task: ChunkTask) -> int | None:
        """See `quantize.fill.executors.WorkerSpec`."""
        rows = (self.specs[member.set].wrong_row(member.task) for member in self.members[task.number])
        return next((row for row in rows if row is not None), None)


class SharedFiller:
    """A worker that fills the same rows in the partials of several sets."""

    def __init__(self, fillers: Sequence[Filler], members: Sequence[Sequence[Member]]) -> None:
        self._fillers, self._members = fillers, members

    def run(self, task: ChunkTask) -> int:
        """Encode the rows of a task for all its members; return their digest, UNKNOWN if none is encoded."""
        members = self._members[task.number]
        copies = [member for member in members if not self._is_encoded(member)]
        encoded = [member for member in members if self._is_encoded(member)]
        for member in copies:
            self._fillers[member.set].run(member.task)
        return self._encode(task.rows, encoded) if encoded else UNKNOWN

    def settle(self) -> None:
        """See `Filler.settle`."""
        for filler in self._fillers:
            filler.settle()

    def _encode(self, rows: RowRange, members: Sequence[Member]) -> int:
        digest = RowsDigest() if any(self._fillers[member.set].spec.digests for member in members) else None
        targets = [self._fillers[member.set].target(rows.tensor) for member in members]
        offsets = [member.task.offset for member in members]
        for encoded in encode_strips(rows, targets, digest):
            for index, (member, data) in enumerate(zip(members, encoded, strict=True)):
                self._fillers[member.set].partials[member.task.output].write(offsets[index], data.data)
                offsets[index] += data.size
        return UNKNOWN if digest is None else digest.value()

    def _is_encoded(self, member: Member) -> bool:
        filler, tensor = self._fillers[member.set], member.task.rows.tensor
        return filler.job.is_encoded(tensor, filler.spec.types[tensor])


def fill_together(missing: Sequence[tuple[Session, Iterable[ChunkTask]]], executor: Executor) -> None:
    """Do chunks of several sessions.

    missing  the sessions, with the chunks to be done of each
    raises   ExecutionError for the first chunk that fails
    """
    sessions = [session for session, _ in missing]
    members = _grouped([tasks for _, tasks in missing])
    tasks = [
        ChunkTask(group[0].task.rows, 0, 0, sum(member.task.n_bytes for member in group), number)
        for number, group in enumerate(members)
    ]
    specs = tuple(session.spec() for session in sessions)

    def done(number: int, digest: int) -> None:
        for member in members[number]:
            session, spec = sessions[member.set], specs[member.set]
            is_digested = spec.digests and session.is_encoded(member.task)
            session.done(member.task.number, digest if is_digested else UNKNOWN)

    executor.run(tasks, SharedSpec(specs, members), done)


def _grouped(missing: Sequence[Iterable[ChunkTask]]) -> tuple[tuple[Member, ...], ...]:
    """Return the missing chunks of all sets by their rows, in the order of the first that lacks them."""
    groups: dict[RowRange, list[Member]] = {}
    for number, tasks in enumerate(missing):
        for task in tasks:
            groups.setdefault(task.rows, []).append(Member(number, task))
    return tuple(map(tuple, _by_tensor(groups.items())))


def _by_tensor(groups: Iterable[tuple[RowRange, list[Member]]]) -> Iterator[list[Member]]:
    """Yield groups tensor by tensor, in the order in which tensors first appear."""
    by_tensor: dict[str, list[tuple[RowRange, list[Member]]]] = {}
    for rows, members in groups:
        by_tensor.setdefault(rows.tensor, []).append((rows, members))
    for tensor in by_tensor.values():
        yield from (members for _, members in sorted(tensor, key=lambda pair: pair[0].start))


@dataclass(frozen=True)
class Written:
    """What `write_outputs` has done.

    n_chunks         of all outputs
    n_resumed        of these, how many an earlier run had done
    reused           how many tensors came from which older file
    notes            what a user should know about the older files
    compile_seconds  how long it took to load or compile the kernels
    verification     what a check of the outputs found, None without one
    calibration      what there is to say of the calibration
    limit            what files are in, if they took most of the time (see limits.py)
    """

    n_chunks: int
    n_resumed: int
    reused: Mapping[Path, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    verification: Verification | None = None
    calibration: tuple[str, ...] = ()
    compile_seconds: float = field(default=0.0, compare=False)
    limit: str | None = field(default=None, compare=False)


def write_outputs(
    outputs: Iterable[Output],
    job: FillJob,
    inputs: Iterable[AnyInput],
    options: FillOptions,
    progress: Progress = no_progress,
) -> Written:
    """Fill all `outputs` and publish each when it is whole.

    inputs    files that are being read, which no output may replace; it may replace those it reuses. They
              must not change meanwhile
    options   how to fill them; see reuse.py and verify.py
    progress  called with the bytes of every chunk, from any thread
    raises    ExecutionError for the first chunk that fails, OutputError for a file that can't be written and
              for leftovers of another run, ChangedInput for an input that has changed before an output gets
              its name; what is done stays for the next run
    """
    return write_sets([OutputSet(tuple(outputs), job, tuple(inputs))], options, [progress])[0]


@dataclass(frozen=True)
class OutputSet:
    """Outputs that are made by one run: a file, or the files of a split set.

    inputs  files that are being read, which no output may replace
    """

    outputs: tuple[Output, ...]
    job: FillJob
    inputs: tuple[AnyInput, ...]

    def table(self) -> ChunkTable:
        layouts = [output.layout for output in self.outputs]
        return ChunkTable.of(layouts, self.job.rows_per_weights(), CHUNK_ELEMS)

    def describe(self, watch: InputWatch) -> dict[str, Any]:
        layouts = {output.path.name: output.layout for output in self.outputs}
        return describe_run(layouts, self.job, watch)


def write_sets(
    sets: Sequence[OutputSet], options: FillOptions, progress: Sequence[Progress]
) -> list[Written]:
    """Fill several sets from the same source at the same time, and publish each output when it is whole.

    progress  of each set; see `write_outputs`
    raises    as `write_outputs`; what is done of any set stays for the next run
    """
    reuse = tuple(map(Path, options.reuse))
    with ExitStack() as stack:
        executor = _executor(options, sets[0].outputs[0].path, stack)
        opened: list[_OpenSet] = []
        watches: dict[tuple[AnyInput, ...], InputWatch] = {}
        by_path = options.scheduler is not None
        for made, progress_of_set in zip(sets, progress, strict=True):
            importances = stored_inputs(each.matrix for each in made.job.importances.values())
            files_of_set = (*made.inputs, *importances)
            if files_of_set not in watches:
                watches[files_of_set] = InputWatch(made.inputs, importances, by_path=by_path)
            watch = watches[files_of_set]
            opened.append(_OpenSet(made, replace(options, reuse=reuse), watch, progress_of_set, stack))
        try:
            for each in opened:
                each.open_outputs(stack)
            began = time.monotonic()
            encodings = [encoding for each in opened for encoding in each.encodings()]
            compile_all(encodings, options.threads, options.compiling)
            compiled, moved_before = time.monotonic(), files.moved()
            for each in opened:
                each.session.publish_whole()
                each.reused.run(executor)
            if len(opened) > 1:
                fill_together([(each.session, each.missing()) for each in opened], executor)
            else:
                session = opened[0].session
                executor.run(opened[0].missing(), session.spec(), session.done)
            is_calibrated = any(made.job.calibrator is not None for made in sets)
            for each in opened:
                each.fill_calibrated()
                each.session.finish()
        except BaseException as error:
            for each in opened:
                each.session.keep(error)
            raise
        for each in opened:
            each.journal.remove()
    limit = None
    if options.scheduler is None and not is_calibrated:
        limit = limit_of(files.moved().since(moved_before), time.monotonic() - compiled, options.threads)
    return [each.written(compiled - began, limit) for each in opened]


def _executor(options: FillOptions, output: Path, stack: ExitStack) -> Executor:
    """Return the executor of the chunks: threads, or the workers of a scheduler until `stack` is closed."""
    if options.scheduler is None:
        return make_executor(options.threads)
    from quantize.fill.cluster import open_executor

    return stack.enter_context(open_executor(options.scheduler, output))


class _OpenSet:
    """A set with its journal and its older files open."""

    def __init__(
        self,
        made: OutputSet,
        options: FillOptions,
        watch: InputWatch,
        progress: Progress,
        stack: ExitStack,
    ) -> None:
        first = made.outputs[0]
        refuse_inputs(journal_path(first.path), made.inputs)
        self._set, self._options, self._table = made, options, made.table()
        self._old = stack.enter_context(OldFiles(map(Path, options.reuse), first.layout.endian))
        for output in made.outputs:
            refuse_inputs(output.path.with_name(output.path.name + PARTIAL_SUFFIX), self._old.paths)
        about = made.describe(watch)
        self.journal = stack.enter_context(
            Journal(first.path, about, restart=options.restart, state=watch.state)
        )
        remove_job(first.path)  # of a session with workers that was killed
        self.session = Session(
            made.outputs,
            self._table,
            made.job,
            self.journal,
            watch,
            progress,
            verify=options.verify,
            read_back=0 if options.scheduler is None else options.threads,
        )

    def open_outputs(self, stack: ExitStack) -> None:
        """Open the partials, and see what is done and what may be reused."""
        self.session.open_outputs(self._set.inputs, stack)
        self._n_resumed = len(self.journal.done)
        self.reused = Reuse(self._old, self.session, self._set.job, self.journal.done)

    def encodings(self) -> Iterable[Encoding]:
        return _encodings(self.session, self._set.job, self.reused)

    def missing(self) -> Iterator[ChunkTask]:
        """Yield the chunks that are not done, without those that the calibration makes."""
        return _missing(self.session, self._set.job, calibrated=False)

    def fill_calibrated(self) -> None:
        job, session = self._set.job, self.session
        if job.calibrator is not None:
            missing = _missing(session, job, calibrated=True)
            job.calibrator.run(missing, session.partials(), session.done)

    def written(self, compile_seconds: float, limit: str | None) -> Written:
        checked, calibrator = self.session.checked, self._set.job.calibrator
        return Written(
            self._table.n_chunks,
            self._n_resumed,
            reused=self.reused.counts,
            notes=(*self._old.notes, *(_damage_note(tensor) for tensor in self.reused.damaged)),
            compile_seconds=compile_seconds,
            limit=limit,
            verification=merge_verifications(checked) if self._options.verify else None,
            calibration=() if calibrator is None else tuple(calibrator.lines()),
        )


def _missing(session: Session, job: FillJob, *, calibrated: bool) -> Iterator[ChunkTask]:
    """Yield the chunks that are not done, of calibrated tensors or of all others."""
    return (task for task in session.missing() if job.is_calibrated(task.rows.tensor) is calibrated)


def _encodings(session: Session, job: FillJob, reused: Reuse) -> Iterable[Encoding]:
    """Yield how each tensor will be encoded, of those that certainly will be."""
    for chunks in session.incomplete():
        name, type_ = chunks.info.name, chunks.info.type
        made = job.is_encoded(name, type_) and not job.is_calibrated(name)
        if made and name not in reused.candidates:
            yield Encoding.of(job, name, type_)


def _damage_note(tensor: OldTensor) -> str:
    return f"{tensor.path}: {tensor.info.name} is damaged; it was made anew"


_LONG_SECONDS = 2.0
"""Runs shorter than this are dominated by start-up and caches, so no limit is reported."""


def limit_of(moved: Moved, seconds: float, n_threads: int) -> str | None:
    """Tell what limited a run: "the disk" or "the page cache" if files took over half of the time; else None.

    moved    what all threads have spent on files
    seconds  how long `n_threads` threads were filling
    """
    if seconds < _LONG_SECONDS or moved.seconds < seconds * n_threads / 2:
        return None
    return "the page cache" if moved.cpu_seconds > moved.seconds / 2 else "the disk"
