"""Executors run the chunks of a run: in threads, or on a cluster (see cluster.py).

An executor has one method, `run(tasks, spec, done)`. It opens `spec` once in every process that works, runs
each task once there, in any order, and calls `done(number, digest)` in the process that called `run`. It
returns when all tasks are done. The first failure stops the rest.

A spec is a value that can be sent to another process; what it opens is not.

The kernels release the interpreter's lock, so threads are enough on one machine: no copies between processes,
one page cache, one set of open files. The threads take tasks from one shared iterator, so memory stays at one
chunk a thread however many tasks there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from gguf_tools.errors import ExecutionError, ToolkitError
from quantize.fill.chunks import ChunkTask

Done = Callable[[int, int], None]
"""Callback of a run: is given the number of a chunk that is done, and its digest. Any thread of the process
that called `run` may call it, several at a time. What it raises ends the run as it is."""


class Worker(Protocol):
    """A spec, opened: does chunks. All threads of a process share one."""

    def run(self, task: ChunkTask) -> int:
        """Do one chunk; return its digest."""

    def settle(self) -> None:
        """Make sure that other machines see what has been written so far; raises OutputError."""


class WorkerSpec(Protocol):
    """How a process comes to a worker; picklable."""

    def open(self) -> AbstractContextManager[Worker]: ...

    def wrong_row(self, task: ChunkTask) -> int | None:
        """Find a row of a finished chunk whose bytes are not there; looks at a few rows, in this process."""


class Executor(Protocol):
    def run(self, tasks: Iterable[ChunkTask], spec: WorkerSpec, done: Done) -> None:
        """Run all tasks.

        raises  ExecutionError for the first task that fails, and what `done` raises
        """


@contextmanager
def naming(task: ChunkTask) -> Iterator[None]:
    """Let an error in this block say, in one line, which chunk failed and why; raises ExecutionError."""
    try:
        yield
    except ToolkitError as error:
        raise ExecutionError(str(error), task) from error
    except Exception as error:
        raise ExecutionError(f"{task}: {type(error).__name__}: {error}", task) from error


_POLL_SECONDS = 0.2
"""Time between two looks of the main thread: long enough to cost nothing, short enough that ctrl-C feels
immediate."""


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
