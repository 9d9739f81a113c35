"""Executors: who runs the chunks.

An executor has one method, `run(tasks, work)`: call `work(task)` once for every task, in any order, and
return when all are done. The first failure stops the rest and comes out as ExecutionError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from gguf_tools.errors import ExecutionError, ToolkitError
from quantize.fill.chunks import ChunkTask


class Executor(Protocol):
    def run(self, tasks: Iterable[ChunkTask], work: Callable[[ChunkTask], None]) -> None: ...


def task_error(task: ChunkTask | None, cause: Exception) -> ExecutionError:
    """Return the error that says which chunk failed and why, in one line."""
    if isinstance(cause, ToolkitError):
        return ExecutionError(str(cause), task)
    return ExecutionError(f"{task}: {type(cause).__name__}: {cause}", task)


def make_executor(n_threads: int) -> Executor:
    """Return the executor for `n_threads` workers."""
    from quantize.fill.executors.serial import SerialExecutor
    from quantize.fill.executors.threads import ThreadExecutor

    return SerialExecutor() if n_threads == 1 else ThreadExecutor(n_threads)
