"""Folders that runs fill, empty and remove: only those that carry our mark, and of their files only ours.

Files are written as a whole. A record says which files a run has finished, with the size and a digest of
each, in one line for several files. After a crash of the machine, a file that is not as its line says has
lost something, and is made again. So files and record need not be on the disk itself at once: they are
brought there once a minute, which is the most work that such a crash costs.

The names of work folders of runs and of the files in them, and of jobs, which lie beside outputs, stand
here too: who only looks for what runs have left needs no torch.

A record is a log: lines of JSON that are appended one by one; each begins with a digest of the rest.

    0f3a...  {"layer": 3, ...}

A line that does not fit its digest ends the log, wherever it is: what stands behind it may be older than
what was lost. A kill leaves half a line at the end, a crash of the machine zeros, or fewer lines.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from gguf_tools.errors import BadRequest, OutputError
from gguf_tools.files.run_lock import LOCK, Refusals, is_run_lock, lock_run
from gguf_tools.system import files
from gguf_tools.system.files import SYNC_SECONDS, OpenFolder, open_own, opened, read_own
from gguf_tools.system.locks import LOCK_SUFFIX


class LineLog:
    """An open log.

    lines    what was in it when it was opened
    is_torn  whether more was in it than whole lines, and more than a kill leaves
    raises   OutputError when it can't be read and written, or is a link
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._writing():
            self._fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                data = files.read_at(self._fd, os.fstat(self._fd).st_size, 0)
                self.lines, n_whole = whole_lines(data)
                self.is_torn = b"\n" in data[n_whole:] or b"\0" in data[n_whole:]
                os.ftruncate(self._fd, n_whole)
            except BaseException:
                os.close(self._fd)
                raise

    def close(self) -> None:
        os.close(self._fd)

    def append(self, data: Any) -> None:
        """Add a line; raises OutputError."""
        with self._writing():
            files.append_all(self._fd, line_of(data))

    def sync(self) -> None:
        """See to it that all lines are on the disk itself; raises OutputError."""
        with self._writing():
            files.sync_data(self._fd)

    def clear(self) -> None:
        """Remove all lines; raises OutputError."""
        with self._writing():
            os.ftruncate(self._fd, 0)

    def _writing(self) -> AbstractContextManager[None]:
        return OutputError.from_os(f"{self._path}: can't be written")


def line_of(data: Any) -> bytes:
    """Return a line, its end included."""
    text = json.dumps(data).encode()
    return f"{xxhash.xxh3_64_hexdigest(text)} ".encode() + text + b"\n"


def whole_lines(content: bytes) -> tuple[list[Any], int]:
    """Parse the lines up to the first damaged one; return them and how many bytes they take."""
    lines: list[Any] = []
    n_bytes = 0
    for line in content.splitlines(keepends=True):
        digest, _, text = line[:-1].partition(b" ")
        if line[-1:] != b"\n" or digest != xxhash.xxh3_64_hexdigest(text).encode():
            break
        lines.append(json.loads(text))
        n_bytes += len(line)
    return lines, n_bytes


RECORD = "record"

MARK = "made by gguf-tools"
"""Key of the first line. A folder with such a line may be filled, emptied and removed."""

_BLOCK_BYTES = 4 << 20

_MOST_BYTES = 1 << 30

Seal = list[Any]
"""Size of a file in bytes, and its digest, as JSON has them."""


@dataclass(frozen=True)
class Entry:
    """A line.

    what   what was finished, as JSON data
    files  name -> size and digest
    """

    what: Any
    files: Mapping[str, Seal]


class FileRecord:
    """The open record of a folder, which nobody else has open.

    entries   all lines but the mark, in their order
    is_torn   whether lines were lost that had been there
    unsynced  names of the finished files that may not be on the disk itself yet
    raises    OutputError when it can't be read and written, or is a link
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        self._log = LineLog(folder / RECORD)
        self.is_torn = self._log.is_torn
        self.entries: list[Entry] = []
        self.unsynced: set[str] = set()
        self._known: dict[str, Seal | None] = {}
        self._synced_at = time.monotonic()
        if not _has_mark(self._log.lines, kind):
            self.forget()
            return
        self.entries = [Entry(line["what"], line["files"]) for line in self._log.lines[1:]]

    def close(self) -> None:
        self._log.close()

    def add(self, what: Any, names: Iterable[str]) -> None:
        """Note that files are finished; if the last `sync` was a minute ago, it is time for one.

        raises  OutputError for a file that can't be read
        """
        sealed = {name: self._seal(name) for name in names}
        self._known |= sealed
        self.unsynced |= sealed.keys()
        self.entries.append(Entry(what, sealed))
        self._log.append({"what": what, "files": sealed})
        if time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """See to it that finished files and the record are on the disk itself; raises OutputError."""
        for name in sorted(self.unsynced):
            sync_file(self._folder / name)
        sync_names(self._folder)
        self._log.sync()
        self.unsynced.clear()
        self._synced_at = time.monotonic()

    def fits(self, name: str, seal: Seal) -> bool:
        """Compare a file with its line; it is read once."""
        if name not in self._known:
            self._known[name] = seal_of(self._folder / name)
        return self._known[name] == seal

    def forget(self) -> None:
        """Begin the record anew."""
        self.entries = []
        self._known = {}
        self.unsynced.clear()
        self._log.clear()
        self._log.append({MARK: self._kind})

    def _seal(self, name: str) -> Seal:
        seal = seal_of(self._folder / name)
        if seal is None:
            raise OutputError(f"{self._folder / name}: can't be read; was it removed meanwhile?")
        return seal


def begins_mark(path: Path, kind: str) -> bool:
    """Tell whether a file is the beginning of a record of that kind, and has nothing but its mark."""
    try:
        return line_of({MARK: kind}).startswith(read_own(path, 1 << 10))
    except OSError:
        return False


def seal_of(path: Path) -> Seal | None:
    """Return the size and the digest of a file; None for what can't be read, or is a link."""
    try:
        fd = open_own(path, os.O_RDONLY)
    except OSError:
        return None
    digest, buffer, n_bytes = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK_BYTES)), 0
    try:
        while count := files.read_into(fd, buffer, n_bytes):
            digest.update(buffer[:count])
            n_bytes += count
    except OSError:
        return None
    finally:
        os.close(fd)
    return [n_bytes, digest.hexdigest()]


def _has_mark(lines: list[Any], kind: str) -> bool:
    return bool(lines) and lines[0] == {MARK: kind}


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder. Its mark is in `record` and in another file, so damage to one of them is survived.

    kind   what the mark says
    about  name of a JSON file that has the mark, too
    names  of the files that we make there
    """

    kind: str
    about: str
    names: re.Pattern[str]

    @property
    def mark(self) -> dict[str, str]:
        """Entry that the JSON file has, beside others."""
        return {MARK: self.kind}

    def is_ours(self, folder: Path) -> bool:
        """Tell whether a folder carries the mark."""
        try:
            with opened(folder) as there:
                return self.marks(there)
        except OSError:
            return False

    def marks(self, folder: OpenFolder) -> bool:
        """Tell whether an open folder carries the mark."""
        start = folder.start_of(RECORD, 1 << 10)
        in_record = _has_mark(whole_lines(start[: start.find(b"\n") + 1])[0], self.kind)
        return in_record or self._parsed(folder.start_of(self.about, _MOST_BYTES)) is not None

    def read_about(self, folder: Path) -> dict[str, Any] | None:
        """Read the JSON file; None where it is missing, damaged or somebody else's."""
        try:
            return self._parsed(read_own(folder / self.about, _MOST_BYTES))
        except OSError:
            return None

    def write_about(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Write the JSON file, with what it has to say beside the mark, and bring it to the disk itself.

        raises  OutputError
        """
        data = json.dumps({**self.mark, **about}, indent=1).encode()
        write_whole_of(folder / self.about, lambda file: file.write(data))
        sync_file(folder / self.about)
        sync_names(folder)

    def _parsed(self, data: bytes) -> dict[str, Any] | None:
        try:
            about = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return about if isinstance(about, dict) and self.mark.items() <= about.items() else None

    def refuse_foreign(self, folder: Path) -> None:
        """Raise BadRequest for a folder that holds something, and not our mark; OutputError for a link.

        A run that was killed, or whose disk was full, before it had set the mark leaves empty files, the
        beginning of the mark, and its lock.
        """
        if folder.is_symlink():
            raise OutputError(f"{folder}: is a link, expected a folder made by this command; remove it")
        if self.is_ours(folder):
            return
        for path in files_of(folder):
            if not self._may_be_left(path):
                raise BadRequest(
                    f"{folder}: holds {path.name!r} and was not made by this command, expected an empty"
                    " folder or none; move it away, or name another one"
                )

    def _may_be_left(self, path: Path) -> bool:
        """Tell whether a file may have been left by a run that had not set the mark yet."""
        if path.is_dir() and not path.is_symlink() and self.is_ours(path):  # of another part of the run
            return True
        if path.name.endswith(LOCK_SUFFIX) and self.names.fullmatch(path.name[: -len(LOCK_SUFFIX)]):
            return True
        if path.name == LOCK and is_run_lock(path):
            return True
        if path.name == RECORD:
            return begins_mark(path, self.kind)
        return bool(self.names.fullmatch(path.name)) and path.is_file() and path.stat().st_size == 0


class ClaimedFolder:
    """An open folder of ours, made if it is not there; no other run can open it until it is closed.

    raises  BadRequest when it is somebody else's; OutputError when it can't be written; the errors of
            `refusals` when another run has it open
    """

    def __init__(
        self, folder: Path, kind: FolderKind, about: Mapping[str, Any], refusals: Refusals, *, restart: bool
    ) -> None:
        """Open a folder; with `restart` all in it that is ours goes first.

        about  what the run is about, for its lock
        """
        self.folder = folder
        with OutputError.from_os(f"{folder}: can't be written"):
            folder.mkdir(exist_ok=True)
        kind.refuse_foreign(folder)
        self._run_lock = lock_run(folder / LOCK, about, refusals)
        try:
            if restart:
                remove_files(folder, kind.names, but=LOCK)
            self._record = FileRecord(folder, kind.kind)
            try:
                self._begin()
            except BaseException:
                self._record.close()
                raise
        except BaseException:
            self._run_lock.close()
            raise

    def _begin(self) -> None:
        """Find out what an earlier run has left."""

    def close(self) -> None:
        self._record.close()
        self._run_lock.close()


def files_of(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder, in order; raises OutputError."""
    with OutputError.from_os(f"{folder}: can't be read"):
        yield from sorted(folder.iterdir())


def remove_files(folder: Path, names: re.Pattern[str], but: str = "") -> None:
    """Remove files with such names, and of links the links alone; raises OutputError."""
    for path in files_of(folder):
        if names.fullmatch(path.name) and path.name != but and (path.is_symlink() or not path.is_dir()):
            with OutputError.from_os(f"{path}: can't be removed"):
                path.unlink()


def write_whole_of(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Have `write` fill a file anew; raises OutputError when it can't be written, or is a link."""
    with (
        OutputError.from_os(f"{path}: can't be written"),
        os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file,
    ):
        write(file)


def sync_file(path: Path) -> None:
    """Bring a file to the disk itself; raises OutputError."""
    with OutputError.from_os(f"{path}: can't be synced"):
        fd = open_own(path, os.O_RDWR)
        try:
            files.sync(fd)
        finally:
            os.close(fd)


def sync_names(folder: Path) -> None:
    """Bring the names in a folder to the disk itself; raises OutputError."""
    with OutputError.from_os(f"{folder}: can't be synced"):
        files.sync_folder(folder)


WORK_SUFFIX = ".work"
JOB_SUFFIX = ".job"

JOB_START = b"GGUFJOB\0"
"""How the file of a job begins: another file under its name is somebody else's."""

OF_LAYERS = re.compile(
    r"(hidden|student)\.\d+|(student\.)?middle|middle\.gradients|embedding\.npz|sums\.\d{5}\.npz"
    r"|layer\.\d{5}\.[0-9a-f]{8}\.(before|middle|first|outer)|strips\.[0-9a-f]{8}\.\d+"
    r"|(layers|strips)\.job(\.partial)?"
)
"""Names of files that hold what has been computed."""

WORK = FolderKind(
    "work", "run.json", re.compile(rf"{LOCK}|run\.json|{RECORD}|records\.jsonl|{OF_LAYERS.pattern}")
)

PART = re.compile(r"(base|model-\d+|forward|backward|draft|original|codes|descent)\.work")
"""Names of work folders in that of a run which has several."""


def work_path(output: Path) -> Path:
    """Return where the work folder of an output is."""
    return output.with_name(output.name + WORK_SUFFIX)
