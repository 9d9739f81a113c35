"""The journal of a run that fills files: which chunks are done, so that a killed run can be resumed.

    PATH.journal
      one line    JSON: what the run is about, a random name for it, and the state of its inputs
      records     20 bytes each, appended: kind, number, value (uint32, uint32, uint64), CRC-32 of those

    kind       number   value
    CHUNK      which    a digest of what the chunk was made of, or 0: its bytes have been written
    PUBLISHED  which    the inode of this output: all chunks are written, next come its header and its name
    SYNCED     0        how many CHUNK records so far stand for bytes that are on the disk itself
    BOOT       0        a digest of this start of the machine: a session begins; 0: chunks that no SYNCED
                        covers may be wrong, because the disk has failed or an input has changed
    FORGOTTEN  first    how many chunks from this one on are no longer done: the file with them is gone

When a process is killed, the kernel keeps everything it has written, so its records hold. After a crash of
the machine, or a failure of the disk, only synced bytes are sure: under another BOOT, CHUNK records that no
SYNCED covers are forgotten. So they are where inputs are in another state than when the run began, because
each SYNCED comes after a look at the inputs. A record that was cut short is ignored, and so is everything
after it.
"""

from __future__ import annotations

import json
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gguf_tools.errors import OutputError
from gguf_tools.files.run_lock import JSONDifference, Refusals, lock_run
from gguf_tools.system import files as system_files
from gguf_tools.system.files import SYNC_SECONDS, Closing
from gguf_tools.system.locks import boot_id

JOURNAL_SUFFIX = ".journal"

FORMAT = 1
"""Version of the journal's format."""

_RUN, _STATE = "run", "state of the inputs"
_HEAD = re.compile(rb'\{"run":"([0-9a-f]{16})",("state of the inputs":"[0-9a-f]{16}",)?"journal":\d')
"""How a journal begins."""

_RECORD = struct.Struct("<IIQ")
_CRC = struct.Struct("<I")
_RECORD_BYTES = _RECORD.size + _CRC.size


class NotAJournal(OutputError):
    """The file under a journal's name was not made by us."""


class _Kind(IntEnum):
    CHUNK = 1
    PUBLISHED = 2
    SYNCED = 3
    BOOT = 4
    FORGOTTEN = 5


_UNSURE = 0


class Journal(Closing):
    """The journal of one run; only one process has it open. Methods may be called from any thread.

    path       the output that it belongs to; the journal is PATH.journal
    about      what the run is about: a mapping of JSON data, compared key by key
    restart    start over, whatever the journal holds
    state      of the inputs: other bytes where one of them may have been changed meanwhile
    run        8 bytes that name the run, the same in all its sessions
    done       chunks that are done, with their digests
    published  outputs that have their names, or were about to get them, with their inodes
    found      whether there was a journal, of this run or another one
    sealed     inodes of the outputs that had their names by that journal, or were about to get them

    raises  OutputError if the file can't be written, if it is no journal, if another process has it open, or
            if it holds finished chunks of another run, naming the first difference
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        about: Mapping[str, Any],
        *,
        restart: bool = False,
        state: bytes = b"",
    ) -> None:
        self.path = journal_path(Path(path))
        self.run = os.urandom(8)
        self.done: dict[int, int] = {}
        self.published: dict[int, int] = {}
        self.found = False
        self.sealed: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self._chunk_records: list[int] = []
        self._n_synced = 0
        self._synced_at = time.monotonic()
        self._run_lock = lock_run(self.path, {"journal": FORMAT, **about}, _refusals(self.path))
        try:
            self._begin(restart, blake2b(state, digest_size=8).hexdigest())
        except NotAJournal:
            self.close()
            raise
        except BaseException:
            if self._has_something_done:
                self.close()
            else:
                self.remove()
            raise

    @property
    def _has_something_done(self) -> bool:
        return bool(self.done or self.published)

    def _begin(self, restart: bool, state: str) -> None:
        data = self.path.read_bytes()
        if not _is_ours(data):
            raise NotAJournal.in_the_way(self.path, "is no journal of a run")
        line, newline, records = data.partition(b"\n")
        stored = _parsed(line) if newline else None
        n_valid = self._load(records) if stored else 0
        self.found, self.sealed = stored is not None, frozenset(self.published.values())
        if restart:
            self.done, self.published = {}, {}
        with OutputError.from_os(f"{self.path}: can't be written:"):
            if stored and self._has_something_done:
                self.run = bytes.fromhex(stored.pop(_RUN))
                before = stored.pop(_STATE, None)
                self._run_lock.refuse_another(stored)
                os.ftruncate(self._run_lock.fd, len(line) + 1 + n_valid)
                if before != state:
                    self.forget_unsynced()
            else:
                self._chunk_records, self._n_synced = [], 0
                about = {_RUN: self.run.hex(), _STATE: state, **self._run_lock.about}
                head = json.dumps(about, separators=(",", ":"))
                os.ftruncate(self._run_lock.fd, 0)
                system_files.append_all(self._run_lock.fd, head.encode() + b"\n")
        self._append(_Kind.BOOT, 0, _this_boot())

    def close(self) -> None:
        """Close the journal and keep it for the next run."""
        self._run_lock.close()

    def remove(self) -> None:
        """Close the journal and delete it: the run is complete, or has nothing worth keeping."""
        if self._run_lock.fd >= 0:
            system_files.remove_held(self._run_lock.fd, self.path, self.close)

    def finish(self, chunk: int, digest: int = 0) -> None:
        """Record that the bytes of a chunk have been written."""
        with self._lock:
            self._append(_Kind.CHUNK, chunk, digest)
            self.done[chunk] = digest
            self._chunk_records.append(chunk)

    def finish_output(self, number: int, inode: int) -> None:
        """Record that all chunks of an output are on the disk; next it gets its header and its name."""
        with self._lock:
            self._append(_Kind.PUBLISHED, number, inode)
            self.published[number] = inode
            self._sync_records()

    def forget(self, chunks: range) -> None:
        """Record that chunks are no longer done, because the file that held them is gone.

        Call it before another file can be mistaken for that one.
        """
        with self._lock:
            if not self.done.keys().isdisjoint(chunks):
                self._append(_Kind.FORGOTTEN, chunks.start, len(chunks))
                self._drop(chunks)

    def forget_unsynced(self) -> None:
        """Record that chunks are no longer done that no `sync` has covered: they may be wrong."""
        with self._lock:
            self._drop(self._chunk_records[self._n_synced :])
            self._append(_Kind.BOOT, 0, _UNSURE)

    def is_sync_due(self) -> bool:
        """Whether it is time for `sync`; true for one caller only."""
        with self._lock:
            due = time.monotonic() - self._synced_at >= SYNC_SECONDS
            if due:
                self._synced_at = time.monotonic()
            return due

    def sync(self, files: Iterable[int]) -> None:
        """Bring what has been written to `files` (descriptors) to the disk, and record that.

        raises  OutputError if the disk fails. Nobody knows then what it lost, so the chunks since the last
                sync are forgotten
        """
        with self._lock:
            n_covered = len(self._chunk_records)
        try:
            for fd in files:
                system_files.sync_data(fd)
        except OSError as error:
            self.forget_unsynced()
            raise OutputError(f"{self.path}: the output can't be synced: {error.strerror}") from error
        with self._lock:
            self._append(_Kind.SYNCED, 0, n_covered)
            self._n_synced = n_covered
            self._sync_records()

    def _drop(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self.done.pop(chunk, None)

    def _sync_records(self) -> None:
        """Bring the records themselves to the disk; without them the work would be done again."""
        with OutputError.from_os(f"{self.path}: can't be synced:"):
            system_files.sync_data(self._run_lock.fd)

    def _append(self, kind: _Kind, number: int, value: int) -> None:
        record = _RECORD.pack(kind, number, value)
        with OutputError.from_os(f"{self.path}: can't be written:"):
            system_files.append_all(self._run_lock.fd, record + _CRC.pack(zlib.crc32(record)))

    def _load(self, data: bytes) -> int:
        """Read the valid records at the start of `data`; returns how many bytes they take."""
        boot = _UNSURE
        n_valid = 0
        for start in range(0, len(data) - _RECORD_BYTES + 1, _RECORD_BYTES):
            record = data[start : start + _RECORD.size]
            if _CRC.pack(zlib.crc32(record)) != data[start + _RECORD.size : start + _RECORD_BYTES]:
                break
            kind, number, value = _RECORD.unpack(record)
            n_valid = start + _RECORD_BYTES
            if kind == _Kind.CHUNK:
                self.done[number] = value
                self._chunk_records.append(number)
            elif kind == _Kind.PUBLISHED:
                self.published[number] = value
            elif kind == _Kind.SYNCED:
                self._n_synced = max(self._n_synced, value)
            elif kind == _Kind.FORGOTTEN:
                self._drop(range(number, number + value))
            elif kind == _Kind.BOOT:
                if value != boot:
                    self._drop(self._chunk_records[self._n_synced :])
                boot = value
        if boot != _this_boot():
            self._drop(self._chunk_records[self._n_synced :])
        return n_valid


def journal_path(output: Path) -> Path:
    """Return where the journal of an output is."""
    return output.with_name(output.name + JOURNAL_SUFFIX)


def _refusals(path: Path) -> Refusals:
    """Return the errors of the journal at `path`."""

    def another(difference: JSONDifference) -> OutputError:
        where, old, new = difference
        what = where.replace(", ", " ", 1)
        return OutputError(
            f"{path} keeps an interrupted run that this one can't resume: {what} was {_shown(old)}, and is"
            f" {_shown(new)} now; --restart starts over, or give the output another name"
        )

    return Refusals(
        unwritable=lambda reason: OutputError(_unwritable_text(path, reason)),
        taken=lambda: OutputError(f"{path}: another process is writing this output"),
        another=another,
    )


def _unwritable_text(path: Path, reason: str) -> str:
    folder = path.parent
    if not folder.exists():
        return f"{path.with_suffix('')}: there is no folder {folder}; create it first"
    if not folder.is_dir():
        return f"{path.with_suffix('')}: {folder} is a file, expected a folder"
    return f"{path}: can't be created: {reason}"


def _shown(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of the first line; None if it is not one of ours, or was cut short."""
    try:
        stored = json.loads(line)
        bytes.fromhex(stored[_RUN])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return stored


def run_of_journal(start: bytes) -> bytes | None:
    """Return the name of the run whose journal begins like this; None for somebody else's file."""
    found = _HEAD.match(start)
    return None if found is None else bytes.fromhex(found[1].decode())


def _is_ours(data: bytes) -> bool:
    """Whether the content of a file is a journal, or what a crash leaves of one: its start, or zeros."""
    is_start = _without_digits(_WHOLE_HEAD).startswith(_without_digits(data))
    return is_start or run_of_journal(data) is not None or not data.strip(b"\0")


_WHOLE_HEAD = b'{"run":"0000000000000000","state of the inputs":"0000000000000000","journal":'


def _without_digits(data: bytes) -> bytes:
    return re.sub(rb"[0-9a-f]", b"0", data[: len(_WHOLE_HEAD) + 1])


def _this_boot() -> int:
    """Return a number for this start of the machine, or for this process where the machine has none."""
    boot = boot_id()
    name = f"{boot}\n" if boot else f"{os.getpid()} {time.time_ns()}"  # as the system's file has it
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
