"""Functions that a worker is asked to call: it opens a job once, and does items of it.

These functions are called by Dask in the worker's process; several threads of it may be at work at once. What
goes wrong comes back as text: an exception of one process may not be one that another can load.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from gguf_tools.cluster.job import PostedJob, Worker, code_version, this_machine
from gguf_tools.errors import ToolkitError


@dataclass(frozen=True)
class BatchOutcome:
    """Outcome of some items.

    worker   address of who did them
    results  of the items that were done, in their order
    seconds  that they took
    failure  why the next item could not be done, or ""
    error    the name of the toolkit's error that says so in a line of its own; "" for any other exception
    refusal  why the worker can't do any item of this job, or ""
    """

    worker: str
    results: list[Any] = field(default_factory=list)
    seconds: float = 0.0
    failure: str = ""
    error: str = ""
    refusal: str = ""


class _OpenJob:
    """A job that is open in this process, and how many threads are at work on it."""

    def __init__(self, job: PostedJob) -> None:
        self.n_users = 0
        self.path = job.path
        self._stack = ExitStack()
        self.worker: Worker = self._stack.enter_context(job.read().open())

    def close(self) -> None:
        self._stack.close()


_MOST_OPEN = 8
"""Most jobs that stay open while nobody works on some of them: the models of an evaluation take turns."""

_open: dict[str, _OpenJob] = {}
_opening = threading.Lock()


def perform(job: PostedJob, items: Sequence[Any]) -> BatchOutcome:
    """Do items, one after the other, up to the first that fails."""
    address = _address()
    refusal = examine(job)
    if refusal:
        return BatchOutcome(address, refusal=refusal)
    try:
        opened = _begin(job)
    except Exception as error:
        return BatchOutcome(address, refusal=_text(error))
    results: list[Any] = []
    started = time.monotonic()
    try:
        for item in items:
            results.append(opened.worker.run(item))
        if job.machine != this_machine():
            opened.worker.settle()
    except Exception as error:
        if job.machine != this_machine():  # nobody made sure that they are seen there
            results.clear()
        name = type(error).__name__ if isinstance(error, ToolkitError) else ""
        return BatchOutcome(address, results, time.monotonic() - started, _text(error), name)
    finally:
        with _opening:
            opened.n_users -= 1
    return BatchOutcome(address, results, time.monotonic() - started)


def examine(job: PostedJob) -> str:
    """Return why this process can't do a job, or ""; the job is not opened."""
    if job.code != code_version():
        return f"runs gguf-tools {code_version()}, expected {job.code}"
    if job.digest in _open:
        return ""
    try:
        job.read()
    except Exception as error:
        return _text(error)
    return ""


async def forget(digest: str) -> None:
    """Close a job that no more items come of; a coroutine, as Dask waits for all other calls."""
    with _opening:
        if digest in _open and not _open[digest].n_users:
            _open.pop(digest).close()


def _begin(job: PostedJob) -> _OpenJob:
    """Return a job, opened; others are closed that are over, or that nobody works on if there are many."""
    with _opening:
        if job.digest not in _open:
            idle = [digest for digest, other in _open.items() if not other.n_users]
            # A job's file is gone when it is over, or another one's.
            paths = {digest: _open[digest].path for digest in idle}
            over = [digest for digest, path in paths.items() if path == job.path or not path.exists()]
            for digest in dict.fromkeys((*over, *idle[: max(0, len(_open) + 1 - _MOST_OPEN)])):
                _open.pop(digest).close()
            _open[job.digest] = _OpenJob(job)
        opened = _open[job.digest]
        opened.n_users += 1
        return opened


def _address() -> str:
    from distributed import get_worker

    return str(get_worker().address)


def _text(error: Exception) -> str:
    text = str(error) if isinstance(error, ToolkitError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split("\n")).strip()
