"""Folders for inputs, in memory where the system has such a place: a reader takes less time than a disk."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

_IN_MEMORY = Path("/dev/shm")


@cache
def _root(process: int) -> Path:
    """The folder of one process, which takes it away when it ends."""
    root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def folder(name: str) -> Path:
    """A folder of this process for the inputs of harness `name`, the same at every call."""
    path = _root(os.getpid()) / name
    path.mkdir(exist_ok=True)
    return path


def remove() -> None:
    """Take the folders of this process away; for a forked one, which ends without being asked."""
    shutil.rmtree(_root(os.getpid()), ignore_errors=True)
