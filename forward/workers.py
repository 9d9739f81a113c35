"""Threads that each take a task of their own, where torch would have them share every operation.

Most operations on a chunk are short, and threads that share a short operation mostly wait for each other. So
every thread takes whole tasks and computes them alone. Results come back in the order of the tasks, so what
is made of them does not depend on the number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self, TypeVar

import torch

from forward.device import threads_on
from forward.malloc_trim import give_back_surplus

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """A pool of `n_threads`, and a context manager; a task that has not begun when it ends never does."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        # torch tells a new thread how many threads an operation may have only when it is asked.
        self._pool = ThreadPoolExecutor(n_threads, initializer=torch.get_num_threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def each(
        self,
        task: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        gradients: bool = False,
        at_once: int | None = None,
    ) -> Iterator[Result]:
        """Yield what `task` returns for every item, in order. Tasks run a few ahead.

        gradients  let tasks differentiate what they compute; fewer run ahead, because each takes more memory
        at_once    tasks that have begun and are not yielded, at most
        """
        begun: deque[Future[Result]] = deque()
        with_or_without = torch.enable_grad()(task) if gradients else torch.inference_mode()(task)
        n_ahead = self.n_threads if gradients else 2 * self.n_threads
        if at_once is not None:
            n_ahead = min(n_ahead, at_once - 1)
        for item in items:
            begun.append(self._pool.submit(with_or_without, item))
            if len(begun) > n_ahead:
                yield begun.popleft().result()
                give_back_surplus()
        while begun:
            yield begun.popleft().result()
            give_back_surplus()


@contextmanager
def threads_for(n_tasks: int, device: torch.device) -> Iterator[int]:
    """Give the number of threads for `n_tasks` tasks, at most as many as torch has.

    With fewer tasks than threads, several threads share each operation, and torch may round differently. A
    device other than the CPU is fed by one thread.
    """
    n_threads = torch.get_num_threads()
    n_workers = threads_on(device, min(n_threads, n_tasks))
    torch.set_num_threads(n_threads // n_workers)
    try:
        yield n_workers
    finally:
        torch.set_num_threads(n_threads)
