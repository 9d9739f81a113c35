"""Memory that is free given back to the system, so that the next step has it whichever thread needs it.

The C library of Linux keeps what a thread has freed for that thread's next request. Threads of a layer's pool
end with the layer, and what is kept for them, a gigabyte or two where matrices are large, is of no use.
"""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Give free memory back to the system, where the C library can be told to."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none, and keeps nothing
    if trim is not None:
        trim(0)
