"""Several sets of outputs from one source: every row is read and decoded once, and encoded for each set.

Each set keeps its own journal, partials and provenance, so each can be resumed, reused and verified as if it
were made alone, and its bytes are the same. What they share is a walk over the source: chunks of the same
rows become one task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from quantize.fill.chunks import ChunkTask, RowRange
from quantize.fill.digests import UNKNOWN, RowsDigest
from quantize.fill.encode import encode_strips
from quantize.fill.executors import Executor
from quantize.fill.filling import Filler, JobSpec
from quantize.fill.session import Session


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
