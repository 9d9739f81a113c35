"""Killing runs in a forked child, at a random moment or at a chosen system call.

Data that a process has handed to the kernel outlives the process. So a kill can only fall between two system
calls, or cut one short. `Fuse` counts the calls that change files, and kills the process before the n-th call
or in the middle of it. Trying every n shows every state that a kill can leave.
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
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import pytest
from tqdm import tqdm

import gguf_tools.files.partial_file
from gguf_tools.errors import GGUFError
from gguf_tools.files.journal import JOURNAL_SUFFIX
from gguf_tools.format.reader import GGUFFile
from tests.support.kill_server import in_served_child

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
_PATIENCE_SECONDS = 600  # a child that takes longer hangs


@pytest.fixture(autouse=True)
def without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip syncs, in modules that import this: they guard against a crash of the machine, and take time."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)


class Fuse:
    """Kills this process at its `n`-th call (from 0) that may change a file; with None it only counts them.

    mode  "before": kill before the call; "torn": kill when half of the data of a write have been written
    """

    def __init__(self, n: int | None, mode: Mode = "before") -> None:
        self.n, self.mode, self.count = n, mode, 0

    @contextmanager
    def armed(self) -> Iterator[Fuse]:
        """Count the calls in this block."""
        originals = {name: getattr(os, name) for name in _CALLS}
        flock, fallocate = fcntl.flock, gguf_tools.files.partial_file._fallocate
        for name, call in originals.items():
            setattr(os, name, self._wrapped(call, tears=name in _TORN))
        fcntl.flock = self._wrapped(flock)
        gguf_tools.files.partial_file._fallocate = self._wrapped(fallocate)
        try:
            yield self
        finally:
            for name, call in originals.items():
                setattr(os, name, call)
            fcntl.flock = flock
            gguf_tools.files.partial_file._fallocate = fallocate

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
    """Call `work` in a forked child. Return 0, 1 if it raised, or minus the signal that killed it.

    kill_after  seconds after which to kill the child
    """
    pid = os.fork()
    if not pid:
        finish_child(work)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def finish_child(work: Callable[[], object]) -> NoReturn:
    """Call `work` in a child, and end it."""
    code = 1
    try:
        # All forks share tqdm's default lock, and one that is killed while holding it keeps it forever.
        tqdm.set_lock(threading.RLock())
        signal.alarm(_PATIENCE_SECONDS)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def killed_at(n: int | None, work: Callable[[], object], mode: Mode = "before") -> bool:
    """Call `work` in a child that is killed at its `n`-th call. Return False if it finished before that.

    work  as `in_served_child` needs it
    """
    code = in_served_child(partial(_work_until_killed, work, n, mode))
    assert code in (0, -signal.SIGKILL), f"the child ended with {code}"
    return code != 0


def _work_until_killed(work: Callable[[], object], n: int | None, mode: Mode) -> None:
    with Fuse(n, mode).armed():
        work()


class WatchedOutputs:
    """A folder of outputs written by runs that are killed. Each holds OLD until a run publishes it.

    wanted     name -> content of the files that must be there in the end, and no others
    published  name -> inode of the outputs that runs have published
    earlier    inodes of the outputs that were there before
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
        """Check, at the end of this block, that nothing unfinished can be taken for a model."""
        if not any(path.suffix == JOURNAL_SUFFIX for path in self.leftovers()):
            # The last run finished, or left no journal to know it by: outputs may be written again.
            self.published.clear()
            self.earlier = self._inodes()
        yield
        for name, data in self.wanted.items():
            self._check(self.folder / name, data)

    def is_complete(self) -> bool:
        """Return whether all outputs are there, and nothing else."""
        return {path.name: path.read_bytes() for path in self.folder.iterdir()} == self.wanted

    def check_all_are_there(self) -> None:
        assert self.is_complete(), sorted(path.name for path in self.folder.iterdir())

    def leftovers(self) -> list[Path]:
        """Return the files that are not outputs."""
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
