"""Folders for inputs, kept in memory where the system allows: a disk is slower than the readers."""

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
    """Return the folder of this process, which is removed when the process ends."""
    root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def folder(name: str) -> Path:
    """Return this process's folder for the inputs of harness `name`, the same at every call."""
    path = _root(os.getpid()) / name
    path.mkdir(exist_ok=True)
    return path


def remove() -> None:
    """Remove the folders of this process. A forked process must call this, as it ends without cleaning up."""
    shutil.rmtree(_root(os.getpid()), ignore_errors=True)
