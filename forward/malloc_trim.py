"""Gives free memory back to the system, so that the next step has it, whichever thread needs it.

The C library of Linux keeps what a thread has freed for that thread's next request. Threads of a layer's pool
end with the layer, and what is kept for them, a gigabyte or two where matrices are large, is of no use.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

MOST_HELD = 512 << 20
"""Size of free memory above which it is given back. To ask for it again takes a tenth of a second or two."""

_INTERVAL = 0.05
"""Time in seconds between two looks at how much there is: one takes up to a millisecond."""


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
        if time.monotonic() < self.next_look or not self.lock.acquire(blocking=False):
            return
        try:
            held = _held_bytes()
            if held is not None:
                if self.floor is None or held < self.floor:
                    self.floor = held
                if held > self.floor + MOST_HELD:
                    give_back()
                    self.floor = _held_bytes()
            self.next_look = time.monotonic() + _INTERVAL
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
