"""An executor of processes: nothing reaches a worker but what can be pickled, as on another machine."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from itertools import islice
from multiprocessing import get_context

from quantize.fill.chunks import ChunkTask
from quantize.fill.executors import Done, Worker, WorkerSpec, naming

_worker: Worker
_open = ExitStack()


class ProcessExecutor:
    """Runs chunks in `n_processes` processes of their own; the journal stays with the caller."""

    def __init__(self, n_processes: int) -> None:
        self.n_processes = n_processes

    def run(self, tasks: Iterable[ChunkTask], spec: WorkerSpec, done: Done) -> None:
        """Run all tasks; raises ExecutionError for the first that fails, and what `done` raises."""
        remaining = iter(tasks)
        running: dict[Future[int], ChunkTask] = {}
        pool = ProcessPoolExecutor(self.n_processes, get_context("spawn"), _begin, (spec,))
        try:
            while True:
                for task in islice(remaining, 2 * self.n_processes - len(running)):
                    running[pool.submit(_run, task)] = task
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    task = running.pop(future)
                    with naming(task):
                        digest = future.result()
                    done(task.number, digest)
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(spec: WorkerSpec) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the process that keeps the journal
    _worker = _open.enter_context(spec.open())


def _run(task: ChunkTask) -> int:
    return _worker.run(task)
