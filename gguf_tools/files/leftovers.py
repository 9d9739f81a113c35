"""Leftovers of runs that were interrupted or killed: what has our marks, and no process holds it.

    NAME.partial        an output that is not whole; NAME.1f2e...8a9b.partial: a small one
    NAME.journal        which chunks of an output are done
    NAME.job            work that was posted for workers
    NAME.work, DIR      finished layers, beside an output or where the user says

What belongs to one run is in use as long as a process holds the lock of any of it, and so is what stands in a
folder in which `gguf-tools cook` is at work. All these locks are shared while what is left is removed: a run
that begins meanwhile waits, see system/locks.py. No step is a link, see system/files.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from gguf_tools.errors import MissingFile, ToolkitError
from gguf_tools.files.journal import JOURNAL_SUFFIX, run_of_journal
from gguf_tools.files.named_files import output_of_small_partial
from gguf_tools.files.owned_folder import JOB_START, JOB_SUFFIX, OF_LAYERS, PART, WORK, WORK_SUFFIX
from gguf_tools.files.partial_file import NO_RUN, PARTIAL_SUFFIX, run_of_partial
from gguf_tools.files.run_lock import LOCK, in_use, is_lock_mark
from gguf_tools.system import files
from gguf_tools.system.files import OpenFolder, opened
from gguf_tools.system.locks import try_lock

_START_BYTES = 256
"""How much of a file is read to see whose it is."""

_COOK = ".cook"
"""Folder in which `cook` holds the lock of the one around it."""


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


def leftovers(place: Path, *, remove: bool = False) -> Iterator[Leftover]:
    """Yield what runs have left in a folder and those inside, or beside an output; `remove` removes it.

    raises  MissingFile where there is no such folder, and no such output nor anything beside it
    """
    if place.is_dir():
        with suppress(OSError), opened(place) as folder:
            if _is_work(folder):
                around = Path(os.path.abspath(place))
                yield from _in_folder(around.parent, only=around.name, remove=remove)
        yield from _in_tree(place, remove)
    elif place.parent.is_dir():
        found = list(_in_folder(place.parent, only=place.name, remove=remove))
        if not found and not place.exists():
            raise MissingFile(f"{place}: no such file or folder, and no leftovers of a run beside it")
        yield from found
    else:
        raise MissingFile(f"{place}: no such file or folder")


def forget(folder: Path) -> None:
    """Remove what a run has left in a work folder, and the folder, if it is empty then.

    One that another run holds stays as it is.
    """
    around = Path(os.path.abspath(folder))
    with suppress(OSError, ToolkitError), opened(around.parent) as parent:
        with parent.inner(around.name) as inner:
            is_ours = _is_work(inner)
        if is_ours:
            with in_use(folder), _Locks(is_own=True) as locks:
                _remove_work(parent, around.name, locks)


def is_begun(output: Path) -> bool:
    """Whether a run has left the journal of an output, or a partial that has its mark, or its header."""
    with suppress(OSError), opened(output.parent) as folder:
        partial = folder.start_of(output.name + PARTIAL_SUFFIX, _START_BYTES)
        journal = folder.start_of(output.name + JOURNAL_SUFFIX, _START_BYTES)
        return (
            run_of_journal(journal) is not None
            or run_of_partial(partial) is not None
            or partial.startswith(b"GGUF")
        )
    return False


def is_unfinished(folder: Path) -> bool:
    """Whether a run has left something in a work folder that it can go on from."""
    try:
        with opened(folder) as there:
            return WORK.marks(there) or any(_parts(there))
    except OSError:
        return False


def _in_tree(root: Path, remove: bool) -> Iterator[Leftover]:
    waiting: list[tuple[str, ...]] = [()]
    while waiting:
        steps = waiting.pop()
        yield from _in_folder(root, steps, remove=remove)
        with suppress(OSError), opened(root, steps) as folder:  # it may be gone, closed, or a link by now
            inner = [each.name for each in folder.entries() if each.is_dir(follow_symlinks=False)]
            waiting += [(*steps, name) for name in reversed(inner) if not name.endswith(WORK_SUFFIX)]


def _in_folder(
    root: Path, steps: tuple[str, ...] = (), only: str = "", *, remove: bool
) -> Iterator[Leftover]:
    """Yield what stands in one folder.

    only  the name to look at, or the output beside which to look; "": all
    """
    found: list[Leftover] = []
    with suppress(OSError), opened(root, steps) as folder:
        for run in _runs(folder):
            wanted = [each for each in run if not only or each == only or each.startswith(f"{only}.")]
            if wanted:
                found += _look(folder, run, wanted, remove=remove)
    yield from sorted(found, key=lambda each: each.path)


def _look(folder: OpenFolder, run: dict[str, bool], wanted: list[str], *, remove: bool) -> list[Leftover]:
    """Tell what is there of a run, and remove it if no process holds any of the run.

    run  name -> whether it is a folder
    """
    with _Locks() as locks:
        is_held = not locks.share_run(folder, run, make=remove)
        found = [
            Leftover(folder.path / name, _size(folder, name, is_folder=run[name]), is_held) for name in wanted
        ]
        # The journal goes last: as long as it is held, the run can't begin anew.
        last = sorted(wanted, key=lambda name: name.endswith(JOURNAL_SUFFIX))
        going = last if remove and not is_held else []
        for name in (*going, *locks.made):
            with suppress(OSError):
                if run.get(name):
                    _remove_work(folder, name, locks)
                elif not name.endswith(JOB_SUFFIX):
                    locks.drop(folder, name)
                elif locks.has(folder, _journal_of(name)):
                    folder.remove(name)
    return found


def _journal_of(job: str) -> str:
    return job.removesuffix(JOB_SUFFIX) + JOURNAL_SUFFIX


def _runs(folder: OpenFolder) -> list[dict[str, bool]]:
    """Return the leftovers of runs in a folder; of each run, name -> whether it is a folder."""
    runs: dict[str, dict[str, bool]] = {}
    journals: dict[bytes, str] = {}
    partials: list[tuple[bytes, str]] = []

    def note(output: str, name: str, *, is_folder: bool = False) -> None:
        runs.setdefault(output, {})[name] = is_folder

    for entry in folder.entries():
        name = entry.name
        if entry.is_dir(follow_symlinks=False):
            with suppress(OSError), folder.inner(name) as inner:
                if _is_work(inner):
                    note(name.removesuffix(WORK_SUFFIX), name, is_folder=True)
        elif name.endswith(JOURNAL_SUFFIX):
            run = run_of_journal(folder.start_of(name, _START_BYTES))
            if run is not None:
                journals[run] = name.removesuffix(JOURNAL_SUFFIX)
                note(journals[run], name)
        elif name.endswith(PARTIAL_SUFFIX):
            run = run_of_partial(folder.start_of(name, _START_BYTES))
            output = output_of_small_partial(name)
            if run is not None:
                partials.append((run, name))
            elif output is not None and entry.is_file(follow_symlinks=False):
                note(output, name)
        elif name.endswith(JOB_SUFFIX) and folder.start_of(name, _START_BYTES).startswith(JOB_START):
            note(name.removesuffix(JOB_SUFFIX), name)
    for run, name in partials:  # a run may have several outputs, and has one journal
        own = name.removesuffix(PARTIAL_SUFFIX)
        note(own if run == NO_RUN else journals.get(run, own), name)
    return list(runs.values())


def _is_work(folder: OpenFolder) -> bool:
    """Whether a folder is a run's: it has finished layers, or the lock of a run."""
    return WORK.marks(folder) or is_lock_mark(folder.start_of(LOCK, _START_BYTES))


def _parts(folder: OpenFolder) -> Iterator[str]:
    """Yield the work folders in one."""
    for entry in folder.entries():
        if PART.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with folder.inner(entry.name) as inner:
                is_ours = _is_work(inner)
            if is_ours:
                yield entry.name


def _own_files(folder: OpenFolder) -> list[str]:
    """Return the names of our files in a work folder but for its lock, those with its mark last."""
    if not WORK.marks(folder):
        return []
    names = [each.name for each in folder.entries() if each.is_file(follow_symlinks=False)]
    ours = [name for name in names if name != LOCK and _is_name_of_work(name)]
    return sorted(ours, key=lambda name: OF_LAYERS.fullmatch(name) is None)


def _is_name_of_work(name: str) -> bool:
    output = output_of_small_partial(name)
    return WORK.names.fullmatch(name) is not None or (
        output is not None and OF_LAYERS.fullmatch(output) is not None
    )


def _size(folder: OpenFolder, name: str, *, is_folder: bool) -> int:
    if not is_folder:
        return folder.size(name)
    with suppress(OSError), folder.inner(name) as inner:
        of_parts = sum(_size(inner, part, is_folder=True) for part in _parts(inner))
        return of_parts + sum(map(inner.size, _own_files(inner)))
    return 0


def _remove_work(parent: OpenFolder, name: str, locks: _Locks) -> None:
    """Remove a work folder whose lock is held; what is not ours in it stays. Raises OSError."""
    with parent.inner(name) as folder:
        if not locks.has(folder, LOCK):  # another folder has its name by now
            return
        for part in list(_parts(folder)):
            _remove_work(folder, part, locks)
        for each in _own_files(folder):
            folder.remove(each)
        with suppress(FileNotFoundError):  # part of a run that has locked the whole
            locks.drop(folder, LOCK)
    with suppress(OSError):  # it is not empty
        parent.remove_folder(name)


class _Locks(ExitStack):
    """Locks of runs that are gone, shared with others who look, until the end of the block.

    is_own  no lock is needed: this thread holds the run
    made    names of journals that were not there, and of empty ones
    """

    def __init__(self, *, is_own: bool = False) -> None:
        super().__init__()
        self._is_own = is_own
        self.made: list[str] = []
        self._fds: dict[Path, int] = {}

    def share_run(self, folder: OpenFolder, run: dict[str, bool], *, make: bool) -> bool:
        """Share all locks of a run; False where a process holds one.

        make  a lock that is not there, so that nobody else can take it
        """
        if folder.path.name == _COOK:
            is_free = self._share(folder, LOCK)
        else:
            is_free = True
            with suppress(OSError), folder.inner(_COOK) as cook:
                is_free = self._share(cook, LOCK)
        for name, is_folder in run.items():
            if is_folder:
                is_free = is_free and self.share_work(folder, name, make=make)
            elif name.endswith(JOB_SUFFIX):  # who posts it holds the journal
                journal = _journal_of(name)
                is_free = is_free and self._share(folder, journal, make=make)
                if is_free and make and folder.size(journal) == 0:  # one that was seen may be gone since
                    self.made.append(journal)
            else:
                is_free = is_free and self._share(folder, name)
        return is_free

    def share_work(self, parent: OpenFolder, name: str, *, make: bool) -> bool:
        """Share the locks of a work folder and of those in it; False where a process holds one."""
        try:
            with parent.inner(name) as folder:
                return self._share(folder, LOCK, make=make) and all(
                    self.share_work(folder, part, make=make) for part in _parts(folder)
                )
        except OSError:
            return False

    def _share(self, folder: OpenFolder, name: str, *, make: bool = False) -> bool:
        path = folder.path / name
        if path in self._fds:
            return True
        try:
            fd = folder.open_own(name, os.O_RDWR | (os.O_CREAT if make else 0))
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        try:
            try_lock(fd, shared=True)
        except OSError:  # somebody holds it, or the file system has no locks
            os.close(fd)
            return False
        self._fds[path] = fd
        self.callback(self._close, path)
        return True

    def has(self, folder: OpenFolder, name: str) -> bool:
        """Whether a file is held, and still has its name."""
        fd = self._fds.get(folder.path / name)
        return self._is_own or (fd is not None and folder.has(name, fd))

    def drop(self, folder: OpenFolder, name: str) -> None:
        """Remove a file, if it is still the one that is locked; raises OSError."""
        path = folder.path / name
        fd = self._fds.get(path)
        if self._is_own:
            folder.remove(name)
        elif fd is not None and folder.has(name, fd):
            os.ftruncate(fd, 0)  # who has it open knows by this that it was no run's
            if files.IS_HELD_OPEN:
                self._close(path)
            folder.remove(name)

    def _close(self, path: Path) -> None:
        fd = self._fds.pop(path, None)
        if fd is not None:
            os.close(fd)
