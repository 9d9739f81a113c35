"""Jobs: what all items of some work refer to, in a file that every worker reads once.

The file lies beside the output, on the file system that all workers see; a worker that doesn't see it is
refused. Its name is that of the output and `.job`. Its path and digest come with every batch, so a worker
that joins late finds it too, and none of it goes through the scheduler. A worker must have the code of who
sends it work.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

from gguf_tools import __version__
from gguf_tools.errors import OutputError
from gguf_tools.files.named_files import remove_leftovers, write_whole
from gguf_tools.files.owned_folder import JOB_START, JOB_SUFFIX
from gguf_tools.lazy import PACKAGES
from gguf_tools.system.files import read_own
from gguf_tools.system.locks import boot_id

_ROOT = Path(__file__).parents[2]


class Worker(Protocol):
    """A job, opened: does items. All threads of a process share one."""

    def run(self, item: Any) -> Any:
        """Do one item; what it returns goes back to who asked."""

    def settle(self) -> None:
        """Make sure that other machines see what has been written so far."""


class Job(Protocol):
    """How a process comes to do items; picklable."""

    def open(self) -> AbstractContextManager[Worker]: ...


@dataclass(frozen=True)
class PostedJob:
    """A job in its file.

    path     of the file, absolute
    digest   of what is in it
    code     which code may open it, see `code_version`
    machine  of who posted it, see `this_machine`
    """

    path: Path
    digest: str
    code: str
    machine: str

    def read(self) -> Job:
        """Return the job; raises OutputError if its file isn't there, or holds something else."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise OutputError(f"{self.path}: can't be read ({error.strerror}); {_SHARED}") from error
        if _digest(data) != self.digest:
            raise OutputError(f"{self.path}: holds another job; {_SHARED}")
        job: Job = pickle.loads(data[len(JOB_START) :])
        return job


_SHARED = "workers must see the same files under the same names as the command that gives them work"


@contextmanager
def posted(job: Job, output: Path) -> Iterator[PostedJob]:
    """Post a job beside an output, for the time of this block; raises OutputError."""
    buffer = BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(job)
    data = JOB_START + buffer.getvalue()
    path = job_path(output)
    _refuse_foreign(path)
    write_whole(path, data)
    try:
        yield PostedJob(path.absolute(), _digest(data), code_version(), this_machine())
    finally:
        remove_job(output)


def remove_job(output: Path) -> None:
    """Remove the job of an output, and what a killed process has left of posting it; no other file."""
    path = job_path(output)
    remove_leftovers(path)
    if is_job(path):
        path.unlink(missing_ok=True)


def _refuse_foreign(path: Path) -> None:
    """Raise OutputError if a file under the name of a job is not ours."""
    if os.path.lexists(path) and not is_job(path):
        raise OutputError.in_the_way(path, "was not made by this program")


def is_job(path: Path) -> bool:
    """Whether a file is work that was posted for workers."""
    try:
        return read_own(path, len(JOB_START)) == JOB_START
    except OSError:
        return False


def job_path(output: Path) -> Path:
    """Return where the job of an output is posted."""
    return output.with_name(output.name + JOB_SUFFIX)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


class _Pickler(pickle.Pickler):
    """Writes paths as absolute ones: a worker runs in a folder of its own."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Path):
            return type(value), (str(value.absolute()),)
        return NotImplemented


@cache
def code_version() -> str:
    """Return the version of the toolkit and a digest of its modules: "0.1.0 (1f0c2a9b)"."""
    digest = blake2b(digest_size=4)
    for package in PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{__version__} ({digest.hexdigest()})"


@cache
def this_machine() -> str:
    """Return a name for the running kernel: what a process of its own writes, its others see at once."""
    return boot_id() or socket.gethostname()
