"""One chunk after the other in the calling thread: the simplest executor, and the one to debug with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quantize.fill.chunks import ChunkTask
from quantize.fill.executors import task_error


class SerialExecutor:
    def run(self, tasks: Iterable[ChunkTask], work: Callable[[ChunkTask], None]) -> None:
        """Call `work` for every task; raises ExecutionError for the first that fails."""
        for task in tasks:
            try:
                work(task)
            except Exception as error:
                raise task_error(task, error) from error
