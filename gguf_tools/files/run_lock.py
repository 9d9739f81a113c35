"""Run locks: only one process at a time works on a run, and it resumes only the run that was started.

A run that can be resumed stores what it is about: its inputs and its choices. The next process locks a file
of the run, and compares its own inputs and choices with the stored ones before it resumes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gguf_tools.errors import ToolkitError
from gguf_tools.system.files import open_own
from gguf_tools.system.lock_files import Lock, Taken, hold
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
    try:
        fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise refusals.unwritable(str(error.strerror)) from error
    try:
        lock = hold(fd, path)
    except OSError as error:
        os.close(fd)
        if not isinstance(error, Taken):
            raise refusals.unwritable(str(error.strerror)) from error
        refused = refusals.taken()
        if error.strerror:
            refused.add_note(error.strerror)
        raise refused from error
    return RunLock(fd, lock, plain(about), refusals)


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
