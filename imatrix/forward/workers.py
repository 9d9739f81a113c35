"""Threads that each take a task of their own, where torch would have them share every operation.

Most operations on a chunk are short, and threads that share a short operation mostly wait for each other. So
every thread takes whole tasks and computes them alone. Results come back in the order of the tasks, so what
is made of them does not depend on the number of threads.

The C library of Linux keeps what a thread has freed for that thread's next request. Threads of a layer's pool
end with the layer, and what is kept for them, a gigabyte or two where matrices are large, is of no use. So
free memory is given back to the system, and the next step has it, whichever thread needs it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, local
from typing import TypeVar

import torch

from gguf_tools.system.files import Closing
from imatrix.forward.device import threads_on

MOST_HELD = 512 << 20
"""Size of free memory above which it is given back. To ask for it again takes a tenth of a second or two."""

_INTERVAL = 0.05
"""Least time in seconds between two looks at how much there is."""

_SHARE = 0.02
"""Most of the time that looks may take. One takes less than a millisecond, or a dozen after a text was cut
into tokens, which leaves the C library many small free pieces to count."""


def give_back() -> None:
    """Give free memory back to the system, where the C library can be told to."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none, and keeps nothing
    if trim is not None:
        trim(0)


def give_back_surplus() -> None:
    """Give free memory back if there is much of it; this may be called after every small step."""
    if sys.platform == "linux":
        _SURPLUS.give_back()


class _Mallinfo(ctypes.Structure):
    """The struct mallinfo2 of glibc, in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    ]  # fmt: skip


@dataclass
class _Surplus:
    """How much the process holds beyond what is in use, and when that was looked at.

    floor  what was left after memory was given back: what others than the C library hold, too
    """

    floor: int | None = None
    next_look: float = 0.0
    lock: Lock = field(default_factory=Lock)

    def give_back(self) -> None:
        began = time.monotonic()
        if began < self.next_look or not self.lock.acquire(blocking=False):
            return
        try:
            held = _held_bytes()
            if held is not None:
                if self.floor is None or held < self.floor:
                    self.floor = held
                if held > self.floor + MOST_HELD:
                    give_back()
                    self.floor = _held_bytes()
            now = time.monotonic()
            self.next_look = now + max(_INTERVAL, (now - began) / _SHARE)
        finally:
            self.lock.release()


_SURPLUS = _Surplus()


def _held_bytes() -> int | None:
    """Return the memory that this process holds beyond what is in use; None where that is not known."""
    info = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if info is None:
        return None
    info.restype = _Mallinfo
    in_use = info()
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * mmap.PAGESIZE - in_use.uordblks - in_use.hblkhd


Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers(Closing):
    """A pool of `n_threads`, and a context manager; a task that has not begun when it ends never does.

    computed  called with the seconds that each task took its thread, when it is yielded
    """

    def __init__(self, n_threads: int, computed: Callable[[float], object] = lambda seconds: None) -> None:
        self.n_threads, self._computed = n_threads, computed
        # torch tells a new thread how many threads an operation may have only when it is asked.
        self._pool = ThreadPoolExecutor(n_threads, initializer=torch.get_num_threads)

    def close(self) -> None:
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
        begun: deque[Future[tuple[Result, float]]] = deque()
        with_or_without = torch.enable_grad()(task) if gradients else torch.inference_mode()(task)

        def timed(item: Item) -> tuple[Result, float]:
            started = time.thread_time()
            return with_or_without(item), time.thread_time() - started

        def taken() -> Result:
            result, seconds = begun.popleft().result()
            self._computed(seconds)
            return result

        n_ahead = self.n_threads if gradients else 2 * self.n_threads
        if at_once is not None:
            n_ahead = min(n_ahead, at_once - 1)
        for item in items:
            begun.append(self._pool.submit(timed, item))
            if len(begun) > n_ahead:
                yield taken()
                give_back_surplus()
        while begun:
            yield taken()
            give_back_surplus()


class _TorchThreads:
    """Numbers of threads that torch gives an operation, each for as long as its work takes.

    A thread of Python has a number of its own, and begins with the one that was set last, whoever set it. So
    one that begins during such work has the number from before the first of it when its own work has ended.
    """

    def __init__(self) -> None:
        self._lock, self._n_inside, self._outside = Lock(), 0, 1
        self._depth = local()

    @contextmanager
    def set(self, n_threads: int) -> Iterator[None]:
        depth = getattr(self._depth, "value", 0)
        with self._lock:
            before = self._outside if self._n_inside and not depth else torch.get_num_threads()
            if not self._n_inside:
                self._outside = before
            self._n_inside += 1
            self._depth.value = depth + 1
            torch.set_num_threads(n_threads)
        try:
            yield
        finally:
            with self._lock:
                self._n_inside -= 1
                self._depth.value = depth
                torch.set_num_threads(before)


_TORCH_THREADS = _TorchThreads()


def torch_threads(n_threads: int | None) -> AbstractContextManager[None]:
    """Let torch give operations of this thread `n_threads` in a block; None: as many as before."""
    return nullcontext() if n_threads is None else _TORCH_THREADS.set(n_threads)


@contextmanager
def threads_for(n_tasks: int, device: torch.device) -> Iterator[int]:
    """Give the number of threads for `n_tasks` tasks, see `workers_for`, and let torch share the others.

    With fewer tasks than threads, several threads share each operation, and torch may round differently.
    """
    n_workers = workers_for(n_tasks, device)
    with torch_threads(torch.get_num_threads() // n_workers):
        yield n_workers


def workers_for(n_tasks: int, device: torch.device) -> int:
    """Return how many threads `n_tasks` tasks take, at most as many as torch has; see `threads_on`."""
    return threads_on(device, min(torch.get_num_threads(), n_tasks))
