"""Executors run the chunks of a run: one after the other, in threads, or wherever a new one puts them.

base.py is their interface.
"""

from __future__ import annotations

from quantize.fill.executors.base import Done, Executor, Worker, WorkerSpec, naming
from quantize.fill.executors.local import SerialExecutor, ThreadExecutor

__all__ = ["Done", "Executor", "Worker", "WorkerSpec", "make_executor", "naming"]


def make_executor(n_threads: int) -> Executor:
    """Return the executor for `n_threads` threads."""
    return SerialExecutor() if n_threads == 1 else ThreadExecutor(n_threads)
