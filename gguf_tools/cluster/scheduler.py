"""Handing out the items of a job: in batches, to whoever has time, again where a worker was lost.

Doing an item twice must do no harm. So when a worker dies, or takes much longer than all before it, its batch
goes to another, and whoever is first counts.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from gguf_tools.cluster.connect import Cluster
from gguf_tools.cluster.job import PostedJob
from gguf_tools.cluster.worker import BatchOutcome, perform
from gguf_tools.errors import ClusterError

Item = TypeVar("Item")
_Answer: TypeAlias = "concurrent.futures.Future[BatchOutcome]"


@dataclass(frozen=True)
class Pace:
    """How work is dealt out, in seconds and counts.

    batch_seconds    how long a batch should take: the scheduler then sees thousands of them, not millions
    batch_items      most items of one batch
    patience         how long a batch is waited for at least, before another worker does it too
    patience_factor  how many times longer than the longest so far that must be
    idle_seconds     how long the work waits without any worker
    lost_batches     how many times a batch may take its worker with it
    looked_at        how many items of each worker are looked at before they count as done
    """

    batch_seconds: float = 15.0
    batch_items: int = 256
    patience: float = 120.0
    patience_factor: float = 4.0
    idle_seconds: float = 120.0
    lost_batches: int = 5
    looked_at: int = 2


class ItemFailed(Exception):
    """An item that a worker could not do.

    item   which
    text   why, in a line
    error  the name of the toolkit's error that says so; "" for any other exception
    """

    def __init__(self, item: Any, text: str, error: str = "") -> None:
        super().__init__(text)
        self.item, self.text, self.error = item, text, error


@dataclass(eq=False)
class _Batch(Generic[Item]):
    items: Sequence[Item]
    number: int
    futures: list[Any] = field(default_factory=list)
    given_out: float = 0.0
    n_lost: int = 0
    is_done: bool = False


class Farm(Generic[Item]):
    """Hands out items of one job, and calls `done` with each and its result, in the calling thread.

    look    is given the first items of every worker before `done` is; returns what is wrong with them, or ""
    raises  ItemFailed for the first item that fails; ClusterError for a worker that can't do the job, and for
            a scheduler or workers that are gone; what `done` raises
    """

    def __init__(
        self,
        cluster: Cluster,
        job: PostedJob,
        done: Callable[[Item, Any], None],
        pace: Pace | None = None,
        look: Callable[[Item], str] | None = None,
    ) -> None:
        self._cluster, self._job, self._done = cluster, job, done
        self._pace, self._look = pace or Pace(), look
        self._n_seen: Counter[str] = Counter()
        self._answers: queue.SimpleQueue[tuple[_Batch[Item], Any, _Answer]] = queue.SimpleQueue()
        self._running: set[_Batch[Item]] = set()
        self._n_batches = 0
        self._longest = 0.0
        self._item_seconds = 0.0  # of late; 0: unknown
        self._slots = 0
        self._seen_workers = time.monotonic()

    def run(self, items: Sequence[Item]) -> None:
        """Have all items done."""
        self._look_at_workers()
        next_look = time.monotonic()
        n_begun = 0
        try:
            while self._running or n_begun < len(items):
                # Two batches a thread: one is at work, and the next is there when it ends.
                while len(self._running) < 2 * self._slots and n_begun < len(items):
                    batch = self._cut(items, n_begun)
                    n_begun += len(batch.items)
                    self._give_out(batch)
                try:
                    batch, future, answer = self._answers.get(timeout=1.0)
                except queue.Empty:
                    pass
                else:
                    self._take(batch, future, answer)
                if time.monotonic() >= next_look:
                    self._look_at_workers()
                    self._look_for_lost()
                    next_look = time.monotonic() + 1.0
        finally:
            self._give_up()

    def _cut(self, items: Sequence[Item], start: int) -> _Batch[Item]:
        """Return the next batch, as large as it should be now."""
        count = int(self._pace.batch_seconds / self._item_seconds) if self._item_seconds else 1
        # Small ones in the end, so that all workers end together.
        share = (len(items) - start) // (4 * self._slots)
        count = max(1, min(count, share, self._pace.batch_items))
        self._n_batches += 1
        return _Batch(items[start : start + count], self._n_batches)

    def _give_out(self, batch: _Batch[Item], avoid: str | None = None) -> None:
        """Have a batch done, by another worker than `avoid` if there is one."""
        options: dict[str, Any] = {}
        others = [worker for worker in self._cluster.workers() if worker != avoid] if avoid else []
        if others:
            options = {"workers": others, "allow_other_workers": True}
        key = f"gguf-tools-{self._job.digest[:8]}-{batch.number}-{len(batch.futures) + batch.n_lost}"
        client = self._cluster.client
        try:
            future = client.submit(
                perform, self._job, batch.items, key=f"{key}-{time.monotonic_ns()}", pure=False, **options
            )
            # An answer is waited for without a time limit, but not in this thread. After one that was given
            # up too early, Dask's client never gets another (dask/distributed, issue 8514).
            waiting = client.gather(future, asynchronous=True)
            answer: _Answer = asyncio.run_coroutine_threadsafe(waiting, client.loop.asyncio_loop)
        except Exception as error:
            raise self._cluster.lost() from error
        batch.futures.append(future)
        batch.given_out = time.monotonic()
        self._running.add(batch)
        answer.add_done_callback(lambda answer: self._answers.put((batch, future, answer)))

    def _take(self, batch: _Batch[Item], future: Any, answer: _Answer) -> None:
        """Take what has become of a batch."""
        if batch.is_done or future not in batch.futures:
            return
        batch.futures.remove(future)
        outcome = self._outcome(answer)
        if outcome is not None:
            self._count(batch, outcome)
            return
        batch.n_lost += 1
        if batch.n_lost > self._pace.lost_batches:
            raise ItemFailed(batch.items[0], "workers that worked on it or near it died repeatedly")
        if not batch.futures:
            self._give_out(batch)

    def _outcome(self, answer: _Answer) -> BatchOutcome | None:
        """Return a worker's answer; None if it is lost with the worker.

        What the future says by now does not count: an answer that has come stays good when its worker dies.
        """
        try:
            return answer.result()
        except Exception as error:
            if self._cluster.client.status != "running":
                raise self._cluster.lost() from error
            if type(error).__name__ == "KilledWorker" or isinstance(error, (OSError, CancelledError)):
                return None
            raise ClusterError(f"{self._cluster.address}: a worker failed: {_line(error)}") from error

    def _count(self, batch: _Batch[Item], outcome: BatchOutcome) -> None:
        """Count the items of a batch that came back."""
        if outcome.refusal:
            raise ClusterError(f"{self._cluster.address}: worker {outcome.worker}: {outcome.refusal}")
        for item, result in zip(batch.items, outcome.results, strict=False):
            self._refuse_undone(outcome.worker, item)
            self._done(item, result)
        if outcome.failure:
            raise ItemFailed(batch.items[len(outcome.results)], outcome.failure, outcome.error)
        batch.is_done = True
        self._running.discard(batch)
        self._cancel(batch)
        self._longest = max(self._longest, time.monotonic() - batch.given_out)
        seconds = outcome.seconds / len(batch.items)
        self._item_seconds = (self._item_seconds + seconds) / 2 if self._item_seconds else seconds

    def _refuse_undone(self, worker: str, item: Item) -> None:
        """Raise ClusterError if an item is not done as the worker says; later ones are taken on trust."""
        if self._look is None or self._n_seen[worker] >= self._pace.looked_at:
            return
        self._n_seen[worker] += 1
        wrong = self._look(item)
        if wrong:
            raise ClusterError(f"{self._cluster.address}: worker {worker} says that it is done, but {wrong}")

    def _look_at_workers(self) -> None:
        """See how many threads the workers have; raises ClusterError when there have been none for long."""
        self._slots = sum(self._cluster.workers().values())
        now = time.monotonic()
        if self._slots:
            self._seen_workers = now
        elif now - self._seen_workers > self._pace.idle_seconds:
            raise ClusterError(f"{self._cluster.address}: all workers have stopped")

    def _look_for_lost(self) -> None:
        """Give out again what is waited for much longer than anything before."""
        patience = max(self._pace.patience, self._pace.patience_factor * self._longest)
        late = [batch for batch in self._running if time.monotonic() - batch.given_out > patience]
        if not late:
            return
        try:
            processing = self._cluster.client.processing()
        except Exception as error:
            raise self._cluster.lost() from error
        holders = {key: worker for worker, keys in processing.items() for key in keys}
        for batch in late:
            self._give_out(batch, avoid=holders.get(batch.futures[-1].key))

    def _cancel(self, batch: _Batch[Item]) -> None:
        for future in batch.futures:
            future.cancel()
        batch.futures.clear()

    def _give_up(self) -> None:
        """Take back what is not done."""
        if self._cluster.client.status == "running":
            for batch in self._running:
                self._cancel(batch)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
