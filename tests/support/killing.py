"""Runs that are killed: in a forked child, at a random moment or at a chosen call of the system.

What a process has given to the kernel outlives it, so a kill can only fall between two calls, or cut one
short. `Fuse` counts the calls that change files, and kills the process before the n-th or in the middle of
it: all the states that a kill can leave are seen by trying every n.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from tqdm import tqdm

import gguf_tools.writer
from gguf_tools.errors import GGUFError
from gguf_tools.journal import JOURNAL_SUFFIX
from gguf_tools.reader import GGUFFile

OLD = b"what was there before"

Mode = Literal["before", "torn"]

_CALLS = (
    "open",
    "ftruncate",
    "write",
    "pwrite",
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "unlink",
    "close",
)
_TORN = ("write", "pwrite")
_PATIENCE_SECONDS = 600  # then a child hangs


@pytest.fixture(autouse=True)
def without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync nothing, in the modules that import this: it is for a crash of the machine, and takes time."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)


class Fuse:
    """Kills this process at its `n`-th call (from 0) that may change a file; None: only counts them.

    mode  "before" the call; "torn": when half of the data of a write have been written
    """

    def __init__(self, n: int | None, mode: Mode = "before") -> None:
        self.n, self.mode, self.count = n, mode, 0

    @contextmanager
    def armed(self) -> Iterator[Fuse]:
        """Count in this block."""
        originals = {name: getattr(os, name) for name in _CALLS}
        flock, fallocate = fcntl.flock, gguf_tools.writer._fallocate
        for name, call in originals.items():
            setattr(os, name, self._wrapped(call, tears=name in _TORN))
        fcntl.flock = self._wrapped(flock)
        gguf_tools.writer._fallocate = self._wrapped(fallocate)
        try:
            yield self
        finally:
            for name, call in originals.items():
                setattr(os, name, call)
            fcntl.flock = flock
            gguf_tools.writer._fallocate = fallocate

    def _wrapped(self, call: Callable[..., Any], *, tears: bool = False) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.count == self.n:
                if tears and self.mode == "torn":
                    fd, data, *offset = args
                    call(fd, memoryview(data).cast("B")[: len(data) // 2], *offset)
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
            return call(*args, **kwargs)

        return counted


def in_child(work: Callable[[], object], *, kill_after: float | None = None) -> int:
    """Call `work` in a forked child; return 0, 1 if it raised, or minus the signal that killed it.

    kill_after  seconds after which the child is killed
    """
    pid = os.fork()
    if not pid:
        code = 1
        try:
            # A lock of tqdm's that all forks share, for ever if one is killed that has it.
            tqdm.set_lock(threading.RLock())
            signal.alarm(_PATIENCE_SECONDS)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(n: int | None, work: Callable[[], object], mode: Mode = "before") -> bool:
    """Call `work` in a child that is killed at its `n`-th call; return False if it was done before that."""

    def lit() -> None:
        with Fuse(n, mode).armed():
            work()

    code = in_child(lit)
    assert code in (0, -signal.SIGKILL), f"the child ended with {code}"
    return code != 0


class WatchedOutputs:
    """A folder with outputs, each OLD until it gets its name, written by runs that are killed.

    wanted     what shall be there in the end, and nothing else
    published  the inodes of the outputs that runs have given their names
    earlier    the inodes of the outputs that were there before
    """

    def __init__(self, folder: Path, wanted: dict[str, bytes]) -> None:
        self.folder, self.wanted = folder, wanted
        self.published: dict[str, int] = {}
        folder.mkdir()
        for name in wanted:
            (folder / name).write_bytes(OLD)
        self.earlier = self._inodes()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Check, after what happens in this block, that nothing half-done can be taken for a model."""
        if not any(path.suffix == JOURNAL_SUFFIX for path in self.leftovers()):
            # A run was complete, or is unknown by now: then outputs may be written again.
            self.published.clear()
            self.earlier = self._inodes()
        yield
        for name, data in self.wanted.items():
            self._check(self.folder / name, data)

    def is_complete(self) -> bool:
        """Whether all outputs are there, and nothing else."""
        return {path.name: path.read_bytes() for path in self.folder.iterdir()} == self.wanted

    def check_all_are_there(self) -> None:
        assert self.is_complete(), sorted(path.name for path in self.folder.iterdir())

    def leftovers(self) -> list[Path]:
        """Return the files that are no outputs."""
        return sorted(path for path in self.folder.iterdir() if path.name not in self.wanted)

    def _inodes(self) -> set[int]:
        return {(self.folder / name).stat().st_ino for name in self.wanted}

    def _check(self, path: Path, data: bytes) -> None:
        assert path.read_bytes() in (OLD, data), f"{path.name}: neither what it was nor what it shall be"
        inode = path.stat().st_ino
        if inode not in self.earlier:
            assert self.published.setdefault(path.name, inode) == inode, f"{path.name}: written again"
        partial = path.with_name(f"{path.name}.partial")
        if partial.exists() and partial.read_bytes() != data:
            with pytest.raises(GGUFError):
                GGUFFile(partial)
