"""Threads that share the parts of a layer's work, where torch would share every operation.

Most operations on a chunk are short: threads that share each of them mostly wait for each other. So every
thread takes parts of its own, and computes them alone. Results come in the order of the parts, so what is
made of them does not depend on how many threads there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


class Workers:
    """A context manager; tasks that have not begun when it ends never do."""

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        # torch tells a new thread how many threads an operation may have only when it is asked.
        self._pool = ThreadPoolExecutor(n_threads, initializer=torch.get_num_threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def each(self, task: Callable[[Part], Result], parts: Iterable[Part]) -> Iterator[Result]:
        """Yield what `task` returns for every part, in order, without gradients; a few parts ahead."""
        begun: deque[Future[Result]] = deque()
        without_gradients = torch.inference_mode()(task)
        for part in parts:
            begun.append(self._pool.submit(without_gradients, part))
            if len(begun) > 2 * self._n_threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


@contextmanager
def threads_for(n_parts: int, device: torch.device) -> Iterator[int]:
    """Give how many threads `n_parts` parts get, at most as many as torch has.

    With fewer parts than threads, each operation is shared by what is left, and torch may round otherwise.
    Other devices than the CPU are fed by one thread.
    """
    n_threads = torch.get_num_threads()
    n_workers = min(n_threads, n_parts) if device.type == "cpu" else 1
    torch.set_num_threads(n_threads // n_workers)
    try:
        yield n_workers
    finally:
        torch.set_num_threads(n_threads)
