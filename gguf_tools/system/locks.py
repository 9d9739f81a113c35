"""Locks on files, and limits of a process: by `fcntl` and `resource`, or by what Windows has instead."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Event, Thread
from typing import Any

_LOCKED_BYTE = 1 << 43
"""Offset of the byte that Windows locks, 8 TiB: nobody can read a locked byte, and no file is that long."""


def try_lock(fd: int, *, shared: bool = False) -> None:
    """Lock an open file against all other processes, until it is closed.

    shared  others may share the lock; on Windows, nobody can
    raises  OSError if one has locked it, or if the file system has no locks; see lock_files.py
    """
    _lock(fd, "LOCK_SH" if shared else "LOCK_EX", "LK_NBLCK")


def unlock(fd: int) -> None:
    """Give the lock of an open file back; raises OSError."""
    _lock(fd, "LOCK_UN", "LK_UNLCK")


def _lock(fd: int, how: str, on_windows: str) -> None:
    try:
        import fcntl
    except ImportError:
        import msvcrt

        system: Any = msvcrt
        os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
        system.locking(fd, getattr(system, on_windows), 1)
        os.lseek(fd, 0, os.SEEK_SET)
    else:
        fcntl.flock(fd, getattr(fcntl, how) | fcntl.LOCK_NB)


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the name of this start of the machine, or "" where it has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def can_limit() -> bool:
    """Whether a process can limit itself on this system; see `limit_process`.

    Windows has no `resource`, and macOS does not keep to a limit of memory.
    """
    try:
        import resource  # noqa: F401
    except ImportError:
        return False
    return sys.platform != "darwin"


def limit_process(cpu_seconds: int | None, memory_bytes: int) -> None:
    """Take time and memory from this process, and for good its way to files, processes and core dumps.

    cpu_seconds  None leaves the time as it is

    Only the descriptors 0, 1 and 2 go on.
    """
    import resource

    # The soft limit ends the process with a signal of its own, the hard one like any other kill.
    if cpu_seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    for what in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
        resource.setrlimit(what, (0, 0))


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_MANY_PROCESSES = 4096
"""A limit of processes and threads from which on there is no need to try."""


def import_numpy() -> None:
    """Import numpy with one thread of OpenBLAS where one for each core could not start and ends the process.

    Where they could, nothing is imported.
    """
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    except (ImportError, AttributeError, OSError):
        limit = -1
    if "numpy" in sys.modules or limit < 0 or limit > _MANY_PROCESSES or _can_start(usable_cores()):
        return
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ["OPENBLAS_NUM_THREADS"]
        if before is not None:
            os.environ["OPENBLAS_NUM_THREADS"] = before


def _can_start(n_threads: int) -> bool:
    """Whether so many more threads can be started at once."""
    done = Event()
    threads = [Thread(target=done.wait, daemon=True) for _ in range(n_threads)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        return False
    finally:
        done.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return True
