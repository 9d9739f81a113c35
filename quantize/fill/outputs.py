"""Outputs: filled in any order, each published as soon as it is whole, resumed after an interruption.

Beside the first output lies a journal of the chunks that are done (see files/journal.py). A run that
fails or is killed leaves it and the partials; the same run again, and no other, resumes from there.

Where the layout has a place for provenance (see provenance.py), it is filled in when all chunks of all
outputs are done, so the first output, which has it, comes last.

Several jobs can be done from one source: every row is read and decoded once, and encoded for each of them.
Each job keeps its own journal, partials and provenance, so each can be resumed, reused and verified as if it
were done alone, and its bytes are the same. What they share is a walk over the source: chunks of the same
rows become one task.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from heapq import merge
from pathlib import Path

from gguf_tools.cluster.job import remove_job
from gguf_tools.files.inputs import AnyInput, InputWatch
from gguf_tools.files.journal import Journal, journal_path
from gguf_tools.files.partial_file import PARTIAL_SUFFIX, refuse_inputs
from gguf_tools.progress import NO_REPORT, Advance
from gguf_tools.system import files
from gguf_tools.system.files import Moved
from quantize.fill.chunks import UNKNOWN, ChunkTask, RowRange
from quantize.fill.executors import Executor, ThreadExecutor
from quantize.fill.filling import Filler, FillJob, JobSpec, fill
from quantize.fill.precompile import Encoding, compile_all
from quantize.fill.provenance import describe_run
from quantize.fill.reuse import OldFiles, Reuse
from quantize.fill.session import Session
from quantize.fill.verify import Verification, merge_verifications
from quantize.importances.files import stored_inputs
from quantize.run_options import RunOptions


@dataclass(frozen=True)
class Member:
    """A chunk of one of the jobs: the number of the job, and the chunk."""

    job: int
    task: ChunkTask


@dataclass(frozen=True)
class SharedSpec:
    """How a process comes to fill chunks of several jobs; picklable.

    specs    of the jobs
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
        rows = (self.specs[member.job].wrong_row(member.task) for member in self.members[task.number])
        return next((row for row in rows if row is not None), None)


class SharedFiller:
    """A worker that fills the same rows in the partials of several jobs."""

    def __init__(self, fillers: Sequence[Filler], members: Sequence[Sequence[Member]]) -> None:
        self._fillers, self._members = fillers, members

    def run(self, task: ChunkTask) -> int:
        """Encode the rows of a task for all its members; return their digest, UNKNOWN if none is encoded."""
        places = [(self._fillers[member.job], member.task) for member in self._members[task.number]]
        encoded = [place for place in places if place[0].is_encoded(task.rows.tensor)]
        for filler, copied in places:
            if not filler.is_encoded(task.rows.tensor):
                filler.run(copied)
        return fill(encoded) if encoded else UNKNOWN

    def settle(self) -> None:
        """See `Filler.settle`."""
        for filler in self._fillers:
            filler.settle()


def fill_together(missing: Sequence[tuple[Session, Iterable[ChunkTask]]], executor: Executor) -> None:
    """Do chunks of several sessions.

    missing  the sessions, with the chunks to be done of each
    raises   ExecutionError for the first chunk that fails
    """
    sessions = [session for session, _ in missing]
    members = _grouped(missing)
    tasks = [
        ChunkTask(group[0].task.rows, 0, 0, sum(member.task.n_bytes for member in group), number)
        for number, group in enumerate(members)
    ]
    specs = tuple(session.spec() for session in sessions)

    def done(number: int, digest: int) -> None:
        for member in members[number]:
            session, spec = sessions[member.job], specs[member.job]
            is_digested = spec.digests and session.is_encoded(member.task)
            session.done(member.task.number, digest if is_digested else UNKNOWN)

    executor.run(tasks, SharedSpec(specs, members), done)


def _grouped(missing: Sequence[tuple[Session, Iterable[ChunkTask]]]) -> tuple[tuple[Member, ...], ...]:
    """Group the missing chunks of all jobs by their rows, in the order of the first that lacks them.

    Where a tensor's sizes are padded for one job and not for another, rows of the same numbers are others.
    """
    groups: dict[tuple[RowRange, tuple[int, ...]], list[Member]] = {}
    for number, (session, tasks) in enumerate(missing):
        tensors = session.sources().tensors
        for task in tasks:
            shape = tensors[task.rows.tensor].shape
            groups.setdefault((task.rows, shape), []).append(Member(number, task))
    return tuple(map(tuple, _by_tensor((rows, members) for (rows, _), members in groups.items())))


def _by_tensor(groups: Iterable[tuple[RowRange, list[Member]]]) -> Iterator[list[Member]]:
    """Yield groups tensor by tensor, in the order in which tensors first appear."""
    by_tensor: dict[str, list[tuple[RowRange, list[Member]]]] = {}
    for rows, members in groups:
        by_tensor.setdefault(rows.tensor, []).append((rows, members))
    for tensor in by_tensor.values():
        yield from (members for _, members in sorted(tensor, key=lambda pair: pair[0].start))


@dataclass(frozen=True)
class Written:
    """Result of `write_outputs`.

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
    jobs: Sequence[FillJob], options: RunOptions, advance: Advance = NO_REPORT.advance
) -> list[Written]:
    """Fill the outputs of several jobs from the same source at once, and publish each when it is whole.

    An output may replace a file that it reuses, but no other input.

    options  how to fill them; see reuse.py and verify.py
    advance  called with the bytes of every chunk, from any thread
    raises   ExecutionError for the first chunk that fails, OutputError for a file that can't be written and
             for leftovers of another run, ChangedInput for an input that has changed before an output gets
             its name; what is done of any job stays for the next run
    """
    with ExitStack() as stack:
        executor = _executor(options, jobs[0].outputs[0].path, stack)
        opened: list[_OpenJob] = []
        watches: dict[tuple[AnyInput, ...], InputWatch] = {}
        by_path = options.scheduler is not None
        for job in jobs:
            importances = stored_inputs(each.matrix for each in job.sources.importances.values())
            files_of_job = (*job.inputs, *importances)
            if files_of_job not in watches:
                watches[files_of_job] = InputWatch(job.inputs, importances, by_path=by_path)
            opened.append(_OpenJob(job, options, watches[files_of_job], advance, stack))
        try:
            for each in opened:
                each.open_outputs(stack)
            began = time.monotonic()
            encodings = [encoding for each in opened for encoding in each.encodings()]
            compile_all(encodings, options.threads, options.compiling)
            compiled, moved_before = time.monotonic(), files.moved()
            for each in opened:
                each.session.publish_whole()
                if each.reused is not None:
                    each.reused.run(executor)
            if len(opened) > 1:
                fill_together([(each.session, each.missing()) for each in opened], executor)
            else:
                session = opened[0].session
                executor.run(opened[0].missing(), session.spec(), session.done)
            is_calibrated = any(job.calibrator is not None for job in jobs)
            _fill_calibrated(opened)  # all before the first has its name: they share work
            for each in opened:
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


def _executor(options: RunOptions, output: Path, stack: ExitStack) -> Executor:
    """Open the executor of the chunks: threads, or the workers of a scheduler until `stack` is closed."""
    if options.scheduler is None:
        return ThreadExecutor(options.threads)
    from gguf_tools.cluster.connect import open_cluster
    from quantize.fill.cluster import ClusterExecutor

    return ClusterExecutor(stack.enter_context(open_cluster(options.scheduler)), output)


class _OpenJob:
    """A job with its journal, its older files and its session open."""

    def __init__(
        self, job: FillJob, options: RunOptions, watch: InputWatch, advance: Advance, stack: ExitStack
    ) -> None:
        first = job.outputs[0]
        refuse_inputs(journal_path(first.path), job.inputs)
        self._job, self._options = job, options
        self._old: OldFiles | None = None
        self.reused: Reuse | None = None
        if options.old_files:
            self._old = stack.enter_context(OldFiles(options.old_files, first.layout.endian))
            for output in job.outputs:
                refuse_inputs(output.path.with_name(output.path.name + PARTIAL_SUFFIX), self._old.paths)
        about = describe_run(job, watch)
        self.journal = stack.enter_context(
            Journal(first.path, about, restart=options.restart, state=watch.state)
        )
        remove_job(first.path)  # of a session with workers that was killed
        self.session = Session(
            job,
            self.journal,
            watch,
            advance,
            verify=options.verify,
            read_back=0 if options.scheduler is None else options.threads,
        )

    def open_outputs(self, stack: ExitStack) -> None:
        """Open the partials, and see what is done and what may be reused."""
        self.session.open_outputs(stack)
        self._n_resumed = len(self.journal.done)
        if self._old is not None:
            self.reused = Reuse(self._old, self.session, self._job, self.journal.done)

    def encodings(self) -> Iterator[Encoding]:
        """Yield how each tensor will be encoded, of those that certainly will be."""
        job, sources = self._job, self._job.sources
        reused = {} if self.reused is None else self.reused.candidates
        for chunks in self.session.incomplete():
            name, type_ = chunks.info.name, chunks.info.type
            made = sources.is_encoded(name, type_) and not job.is_calibrated(name)
            if made and name not in reused:
                yield Encoding.of(sources, name, type_)

    def missing(self, *, calibrated: bool = False) -> Iterator[ChunkTask]:
        """Yield the chunks that are not done, of calibrated tensors or of all others."""
        is_calibrated = self._job.is_calibrated
        return (task for task in self.session.missing() if is_calibrated(task.rows.tensor) is calibrated)

    def calibrated(self) -> Generator[int, None, None]:
        """Yield how far the calibrated tensors have come; see `quantize.fill.filling.Calibrator.steps`."""
        if self._job.calibrator is not None:
            missing = self.missing(calibrated=True)
            yield from self._job.calibrator.steps(missing, self.session.partials(), self.session.done)

    def written(self, compile_seconds: float, limit: str | None) -> Written:
        checked, calibrator = self.session.checked, self._job.calibrator
        return Written(
            self.session.n_chunks,
            self._n_resumed,
            reused={} if self.reused is None else self.reused.counts,
            notes=() if self.reused is None else self.reused.notes(),
            compile_seconds=compile_seconds,
            limit=limit,
            verification=merge_verifications(checked) if self._options.verify else None,
            calibration=() if calibrator is None else tuple(calibrator.lines()),
        )


def _fill_calibrated(jobs: Iterable[_OpenJob]) -> None:
    """Take the steps of all jobs, always of the one that is behind."""
    with ExitStack() as opened:
        for _ in merge(*(opened.enter_context(closing(each.calibrated())) for each in jobs)):
            pass


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
