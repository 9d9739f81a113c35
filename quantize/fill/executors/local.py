"""Chunks in this process: one after the other, or on plain threads.

The kernels release the interpreter's lock, so threads are enough: no copies between processes, one page
cache, one set of open files. The threads take tasks from one shared iterator, so memory stays at one chunk a
thread however many tasks there are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from quantize.fill.chunks import ChunkTask
from quantize.fill.executors.base import Done, Worker, WorkerSpec, naming

_POLL_SECONDS = 0.2
"""Time between two looks of the main thread: long enough to cost nothing, short enough that ctrl-C feels
immediate."""


class SerialExecutor:
    """One chunk after the other in the calling thread: the simplest executor, and the one to debug with."""

    def run(self, tasks: Iterable[ChunkTask], spec: WorkerSpec, done: Done) -> None:
        """Run all tasks; raises ExecutionError for the first that fails, and what `done` raises."""
        with spec.open() as worker:
            for task in tasks:
                with naming(task):
                    digest = worker.run(task)
                done(task.number, digest)


class ThreadExecutor:
    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads

    def run(self, tasks: Iterable[ChunkTask], spec: WorkerSpec, done: Done) -> None:
        """Run all tasks on `n_threads` threads, each of which calls `done` after every task.

        Leaves no thread running, even when it raises or is interrupted.

        raises  ExecutionError for the first task that fails, and what `done` raises
        """
        with spec.open() as worker:
            _run(tasks, worker, done, self.n_threads)


def _run(tasks: Iterable[ChunkTask], worker: Worker, done: Done, n_threads: int) -> None:
    remaining = iter(tasks)
    lock = threading.Lock()
    stop = threading.Event()
    failures: list[BaseException] = []

    def take_task() -> ChunkTask | None:
        with lock:
            return None if stop.is_set() else next(remaining, None)

    def work() -> None:
        try:
            while (task := take_task()) is not None:
                with naming(task):
                    digest = worker.run(task)
                done(task.number, digest)
        except BaseException as error:  # a callback may raise KeyboardInterrupt; it is for the main thread
            failures.append(error)
            stop.set()

    threads = [threading.Thread(target=work, name=f"chunk-{i}", daemon=True) for i in range(n_threads)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(_POLL_SECONDS)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
