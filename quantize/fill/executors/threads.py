"""Chunks on plain threads.

The kernels release the interpreter's lock, so threads are enough: no copies between processes, one
page cache, one set of open files. Workers take tasks from one shared iterator, so memory stays at one
chunk a worker however many tasks there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from quantize.fill.chunks import ChunkTask
from quantize.fill.executors import task_error

# How often the main thread looks up: long enough to cost nothing, short enough that ctrl-C feels immediate.
_POLL_SECONDS = 0.2


class ThreadExecutor:
    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads

    def run(self, tasks: Iterable[ChunkTask], work: Callable[[ChunkTask], None]) -> None:
        """Call `work` for every task on `n_threads` threads; raises ExecutionError for the first that fails.

        Leaves no thread running, also when it raises or is interrupted.
        """
        remaining = iter(tasks)
        lock = threading.Lock()
        stop = threading.Event()
        failures: list[tuple[ChunkTask | None, Exception]] = []

        def take_task() -> ChunkTask | None:
            with lock:
                return None if stop.is_set() else next(remaining, None)

        def worker() -> None:
            task = None
            try:
                while (task := take_task()) is not None:
                    work(task)
            except Exception as error:
                failures.append((task, error))
                stop.set()

        threads = [
            threading.Thread(target=worker, name=f"chunk-{i}", daemon=True) for i in range(self.n_threads)
        ]
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
            task, cause = failures[0]
            raise task_error(task, cause) from cause
