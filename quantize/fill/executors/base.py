"""The interface of executors: what they are given, and what they call.

An executor has one method, `run(tasks, spec, done)`. It opens `spec` once in every process that works, runs
each task once there, in any order, and calls `done(number, digest)` in the process that called `run`. It
returns when all tasks are done. The first failure stops the rest.

A spec is a value that can be sent to another process; what it opens is not.
"""

from __future__ import annotations

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
        ...

    def settle(self) -> None:
        """Make sure that other machines see what has been written so far; raises OutputError."""
        ...


class WorkerSpec(Protocol):
    """How a process comes to a worker; picklable."""

    def open(self) -> AbstractContextManager[Worker]: ...

    def wrong_row(self, task: ChunkTask) -> int | None:
        """Return a row of a chunk that is done whose bytes are not there; looks at a few, in this process."""
        ...


class Executor(Protocol):
    def run(self, tasks: Iterable[ChunkTask], spec: WorkerSpec, done: Done) -> None:
        """Run all tasks.

        raises  ExecutionError for the first task that fails, and what `done` raises
        """
        ...


@contextmanager
def naming(task: ChunkTask) -> Iterator[None]:
    """Let an error in this block say, in one line, which chunk failed and why; raises ExecutionError."""
    try:
        yield
    except ToolkitError as error:
        raise ExecutionError(str(error), task) from error
    except Exception as error:
        raise ExecutionError(f"{task}: {type(error).__name__}: {error}", task) from error
