"""Locks on files, and limits of a process: by `fcntl` and `resource`, or by what Windows has instead.

A lock holds on every file system: it is the system's, or a file where there is none. Some network file
systems have no locks. There `hold` makes a file NAME.lock, which says who holds it: host, start of the
machine, process. A lock of a process that is gone on this machine is taken over. One of another machine
can't be judged from here, so the error says which file to remove.

A run holds its files alone. `gguf-tools clean` shares its locks, and holds them while it looks and removes;
so a run can tell it from another run, and waits until it is done. What it removes it empties before. So a
run that has opened such a file knows that it was no run's any more, and begins with a new one.
"""

from __future__ import annotations

import errno
import json
import os
import random
import secrets
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from gguf_tools.system.files import is_at, open_own

_LOCKED_BYTE = 1 << 43
"""Offset of the byte that Windows locks, 8 TiB: nobody can read a locked byte, and no file is that long."""


def try_lock(fd: int, *, shared: bool = False) -> None:
    """Lock an open file against all other processes, until it is closed.

    shared  others may share the lock; on Windows, nobody can
    raises  OSError if one has locked it, or if the file system has no locks
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


def least_environment() -> dict[str, str]:
    """Return the variables without which no process starts: Windows has one."""
    return {name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ}


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


LOCK_SUFFIX = ".lock"

NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
"""Errors of flock where the file system has no locks."""


class Taken(OSError):
    """Another process holds the lock; `strerror` says what else is known of it, or is empty.

    is_removed  none does, but the file was removed or replaced by the process that held it
    """

    def __init__(self, what: str = "", *, is_removed: bool = False) -> None:
        super().__init__(errno.EWOULDBLOCK, what)
        self.is_removed = is_removed


@dataclass(frozen=True)
class Lock:
    """A lock that this process holds, until `release` or the end of the process.

    path  the lock's own file; None: the lock is on an open file, and ends when that is closed
    """

    path: Path | None = None

    def release(self) -> None:
        """Let another process have it. Close the file that it is on before, if it is on one."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def open_held(path: Path, flags: int) -> tuple[int, Lock]:
    """Open a file that only we write, and lock it against all other processes; returns a descriptor, too.

    raises  OSError as `open_own` and `hold`
    """
    for _ in range(_REMOVALS):
        fd = open_own(path, flags)
        try:
            return fd, hold(fd, path)
        except BaseException as error:
            was_removed = isinstance(error, Taken) and error.is_removed and not os.fstat(fd).st_size
            os.close(fd)
            if not was_removed:
                raise
    raise Taken(is_removed=True)


_REMOVALS = 100
"""How often a run begins with a new file, when `gguf-tools clean` has removed the one that it has opened."""


def hold(fd: int, path: Path) -> Lock:
    """Lock an open file against all other processes.

    path    the file's name, to which a lock's own file adds .lock where the file system has no locks
    raises  Taken if another process holds it, or has removed or replaced it between our open and our lock;
            OSError if the lock's own file can't be made
    """
    lock = _hold(fd, path)
    if not is_at(fd, path):
        lock.release()
        raise Taken(is_removed=True)
    return lock


def _hold(fd: int, path: Path) -> Lock:
    until = time.monotonic() + _SECONDS_TO_CLEAN
    while True:
        try:
            try_lock(fd)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return _make_lock_file(path.with_name(path.name + LOCK_SUFFIX))
            if time.monotonic() > until or not _is_shared(fd):
                raise Taken from error
            time.sleep(random.uniform(0.001, 0.02))  # two runs that ask at once must not go on doing so
        else:
            return Lock()


_SECONDS_TO_CLEAN = 60.0
"""How long a run waits for `gguf-tools clean`, which removes work folders of hundreds of gigabytes."""


def _is_shared(fd: int) -> bool:
    """Whether those who have locked a file share it, which no run does."""
    try:
        try_lock(fd, shared=True)
    except OSError:
        return False
    unlock(fd)
    return True


def _make_lock_file(path: Path) -> Lock:
    """Make the file of a lock, in place of one whose process is gone."""
    while True:
        try:
            fd = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            _remove_stale(path)
            continue
        with os.fdopen(fd, "w") as file:
            json.dump(_this_process(), file)
        return Lock(path)


def _remove_stale(path: Path) -> None:
    """Remove a lock file whose process is gone; raises Taken for any other.

    It gets another name first, which only one process succeeds in giving it. If a new lock has taken its
    place meanwhile, that one is put back.
    """
    _refuse_living(path)
    moved = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        os.rename(path, moved)
        try:
            _refuse_living(moved)
        except Taken:
            with suppress(FileExistsError):
                os.link(moved, path)
            raise
        finally:
            moved.unlink()


def _refuse_living(path: Path) -> None:
    """Raise Taken unless the process of a lock file is known to be gone."""
    try:
        holder = json.loads(path.read_bytes() or b"{}")
        host, boot, pid, started = (holder.get(key) for key in _this_process())
        is_young = time.time() - path.stat().st_mtime < _SECONDS_TO_WRITE
    except FileNotFoundError:
        return
    except (ValueError, AttributeError, OSError):
        raise Taken(f"{path.name} is no lock of ours; remove it") from None
    if not holder:  # its process was killed before it wrote who it is, or is about to write it
        if is_young:
            raise Taken
        return
    if host != socket.gethostname():
        raise Taken(f"process {pid} on {host}; if that process has ended, remove {path.name}")
    if boot == boot_id() and isinstance(pid, int) and _is_running(pid, started):
        raise Taken(f"process {pid}")


_SECONDS_TO_WRITE = 5.0


def _this_process() -> dict[str, Any]:
    """Return a text that tells this process from all others."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": boot_id(), "pid": pid, "started": _started(pid)}


def _started(pid: int) -> str:
    """Return when a process started, in ticks since the machine did; "" where the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_running(pid: int, started: Any) -> bool:
    """Whether a process of this machine is still there, and no other one has got its number."""
    if os.name == "nt":  # where kill would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return started == _started(pid)
