"""What runs have left that were interrupted or killed: files with our marks that no process holds.

    NAME.partial, NAME.1f2e3d4c.partial   outputs that are not whole
    NAME.journal                          which chunks of an output are done
    NAME.job                              work that was posted for workers

A run that is still there holds a lock on its file. One whose output nobody asks for again stays for ever;
`gguf-tools clean` finds it, with the folders of finished layers, which belong to a floor above.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gguf_tools.cluster.job import is_job
from gguf_tools.files.journal import JOURNAL_SUFFIX, is_journal
from gguf_tools.files.partial_file import PARTIAL_SUFFIX, is_partial
from gguf_tools.system.files import open_own
from gguf_tools.system.locks import try_lock

_OF_A_SMALL_FILE = re.compile(r".*\.[0-9a-f]{8}\.partial")


@dataclass(frozen=True)
class Leftover:
    """Something that a run has left.

    path     a file, or a folder of finished layers
    n_bytes  that it takes
    is_held  whether a run holds it: then it is no leftover yet
    """

    path: Path
    n_bytes: int
    is_held: bool


def leftover_files(folder: Path) -> Iterator[Leftover]:
    """Yield the files in a folder that a run has left, or is writing now; nothing in folders inside."""
    for path in sorted(folder.iterdir()):
        if _is_ours(path):
            yield Leftover(path, path.stat().st_size, is_held(path))


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of a file; one that can't be opened counts as held."""
    try:
        fd = open_own(path, os.O_RDWR)
    except OSError:
        return True
    try:
        try_lock(fd)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def remove(leftover: Leftover) -> None:
    """Remove a file that a run has left, unless another one has taken it up meanwhile."""
    if not is_held(leftover.path):
        with suppress(FileNotFoundError):
            leftover.path.unlink()


def _is_ours(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    if path.name.endswith(JOURNAL_SUFFIX):
        return is_journal(path)
    if path.name.endswith(PARTIAL_SUFFIX):
        return bool(_OF_A_SMALL_FILE.fullmatch(path.name)) or is_partial(path)
    return path.name.endswith(".job") and is_job(path)
