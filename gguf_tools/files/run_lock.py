"""Run locks: only one process at a time works on a run, and it resumes only the run that was started.

A run that can be resumed stores what it is about: its inputs and its choices. The next process locks a file
of the run, and compares its own inputs and choices with the stored ones before it resumes.

A run with work folders holds the outermost one from its first file to its last, see `in_use`: also while it
writes its outputs, and while it removes what it needed for them. The lock says in its file whose it is.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gguf_tools.errors import BadRequest, OutputError, ToolkitError
from gguf_tools.system import files
from gguf_tools.system.files import read_own
from gguf_tools.system.locks import LOCK_SUFFIX, Lock, Taken, open_held
from gguf_tools.text import for_json


class JSONDifference(NamedTuple):
    """The first difference of two pieces of JSON data: its place, and what is there in each."""

    where: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Refusals:
    """The errors of a kind of run.

    unwritable  given a reason: the file can't be created
    taken       another process holds the run
    another     given a difference: the stored run has other inputs or choices
    """

    unwritable: Callable[[str], ToolkitError]
    taken: Callable[[], ToolkitError]
    another: Callable[[JSONDifference], ToolkitError]


class RunLock:
    """A run that belongs to this process, until `close` or the end of the process.

    about  what the run is about, as JSON gives it back
    fd     descriptor of the locked file, for reading and appending; -1 when closed
    """

    def __init__(self, fd: int, lock: Lock, about: dict[str, Any], refusals: Refusals) -> None:
        self.fd, self.about, self._lock, self._refusals = fd, about, lock, refusals

    def refuse_another(self, stored: Mapping[str, Any]) -> None:
        """Raise an error if `stored` is about something else."""
        difference = first_difference(stored, self.about)
        if difference is not None:
            raise self._refusals.another(difference)

    def close(self) -> None:
        """Let another process have the run."""
        fd, self.fd = self.fd, -1  # an interruption must not have it closed twice
        if fd >= 0:
            os.close(fd)
            self._lock.release()


def lock_run(path: Path, about: Mapping[str, Any], refusals: Refusals) -> RunLock:
    """Lock `path`, created if it is missing, and return the lock of the run.

    about   what the run is about: a mapping of JSON data
    raises  the errors of `refusals` if the file can't be created or is a link, or if another process holds it
    """
    outer = _held.get(_place(path))
    if outer is not None:  # by this thread, around this run
        return RunLock(os.dup(outer.fd), Lock(), plain(about), refusals)
    try:
        fd, lock = open_held(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except Taken as error:
        refused = refusals.taken()
        if error.strerror:
            refused.add_note(error.strerror)
        raise refused from error
    except OSError as error:
        raise refusals.unwritable(str(error.strerror)) from error
    return RunLock(fd, lock, plain(about), refusals)


LOCK = "lock"
"""Name of the lock in a folder."""

_MARK = b'{"made by gguf-tools": "lock"}\n'

_held: dict[tuple[int, str], RunLock] = {}
"""The locks of `in_use`, by thread and path."""


def _place(path: Path) -> tuple[int, str]:
    return threading.get_ident(), os.path.abspath(path)


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Hold a folder, made if it is not there, against other runs and `gguf-tools clean`.

    Whatever this thread locks in the folder itself meanwhile is part of it. A folder in which nothing else is
    left at the end goes.

    raises  BadRequest when another run has it; OutputError when it can't be written
    """
    path = folder / LOCK
    if _place(path) in _held:
        yield
        return
    with _locked(folder, path) as lock:
        _held[_place(path)] = lock
        try:
            yield
        finally:
            del _held[_place(path)]
            with suppress(OSError):  # whose error ends the run has said more
                if {*os.listdir(folder)} <= {LOCK, LOCK + LOCK_SUFFIX}:
                    files.remove_held(lock.fd, path, lock.close)
                    folder.rmdir()


@contextmanager
def _locked(folder: Path, path: Path) -> Iterator[RunLock]:
    while True:
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            if isinstance(error, FileExistsError) and not os.path.lexists(folder):
                continue  # it was there, and `clean` has removed it before it was looked at
            raise OutputError(f"{folder}: can't be written ({error.strerror})") from error
        try:
            lock = lock_run(path, {}, refusals_of(folder))
            break
        except OutputError:
            if folder.is_dir():  # else `clean` has removed it meanwhile
                raise
    try:
        content = files.read_at(lock.fd, len(_MARK), 0)
        if not _MARK.startswith(content):
            raise OutputError.in_the_way(path, "was not made by this program")
        with OutputError.from_os(f"{folder}: can't be written"):
            os.write(lock.fd, _MARK[len(content) :])
        yield lock
    finally:
        lock.close()


def is_run_lock(path: Path) -> bool:
    """Whether a file is the lock of a folder."""
    try:
        return is_lock_mark(read_own(path, len(_MARK)))
    except OSError:
        return False


def is_lock_mark(start: bytes) -> bool:
    """Whether a file that starts like this is the lock of a folder."""
    return start == _MARK


def refusals_of(folder: Path) -> Refusals:
    """Return the errors of a run in a work folder."""
    return Refusals(
        unwritable=lambda reason: OutputError(f"{folder}: can't be written ({reason})"),
        taken=lambda: BadRequest(f"{folder}: another run is writing this output"),
        another=lambda difference: BadRequest(
            f"{folder}: begun with another {difference.where} ({str(difference.old)[:60]}, now"
            f" {str(difference.new)[:60]}); --restart starts over"
        ),
    )


def plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data as JSON gives them back; numbers that other programs round, such as times, are texts."""
    given_back: dict[str, Any] = json.loads(json.dumps(for_json(data)))
    return given_back


def first_difference(old: Any, new: Any, where: str = "") -> JSONDifference | None:
    """Return the first difference of two pieces of JSON data, or None.

    A large number and its text are the same: earlier versions wrote the number.
    >>> first_difference({"plan": {"a": "Q4_0"}}, {"plan": {"a": "Q8_0"}})
    JSONDifference(where='plan, a', old='Q4_0', new='Q8_0')
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in (*new, *(key for key in old if key not in new)):
            place = f"{where}, {key}" if where else str(key)
            difference = first_difference(old.get(key), new.get(key), place)
            if difference is not None:
                return difference
        return None
    return None if for_json(old) == for_json(new) else JSONDifference(where, old, new)
