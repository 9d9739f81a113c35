"""What a run could not be faster than: its files, or the work itself."""

from __future__ import annotations

from gguf_tools.system.files import Moved

_LONG_SECONDS = 2.0
"""Time from which on it is told: below, caches and start-up decide."""


def limit_of(moved: Moved, seconds: float, n_threads: int) -> str | None:
    """Return "the disk" or "the page cache" if threads spent more than half of the time on files; else None.

    moved    what all threads have spent on files
    seconds  how long `n_threads` threads were filling
    """
    if seconds < _LONG_SECONDS or moved.seconds < seconds * n_threads / 2:
        return None
    return "the page cache" if moved.cpu_seconds > moved.seconds / 2 else "the disk"
