"""Inputs of a run: files that must hold the same bytes for as long as it reads them, and when it is resumed.

Where device, inode, size and times of a file are the same, nothing has changed: no program can put the time
of a change (ctime) back. Where they differ, the file may still be the same, for instance downloaded again.
Then the digest of its header and of samples of every tensor decides. Of a tensor its start, its end and
several places between them are looked at, so that another revision of a model is noticed by any tensor that
is another one. Files are read and not mapped: a map of a file that becomes shorter kills the process.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from gguf_tools.errors import ChangedInput
from gguf_tools.format.reader import GGUFFile
from gguf_tools.format.shards import GGUFSet
from gguf_tools.system.files import NO_WAIT, open_file, read_at
from gguf_tools.text import shown

PIECE_BYTES = 4096
_WHOLE_BYTES = 1 << 20
"""Size up to which a tensor is read whole."""

_LEAST_PIECES, _MOST_PIECES = 4, 64
_BYTES_OF_A_PIECE = 4 << 20

_START_BYTES = 1 << 20
_LARGEST_HEADER = 256 << 20
_FILE_PIECES = 16
"""How many pieces are read of a file whose tensors are not known, besides its start."""

_AT_ONCE = 8
"""How many threads read samples, which on a network or a disk is mostly waiting."""

_A_FEW = 64
"""How many tensors a thread takes at a time."""

_Place = tuple[str, tuple[int, int]]

_FINE_CLOCK, _COARSE_CLOCK = 20_000_000, 2_000_000_000
"""Nanoseconds in which two changes may get the same time: where times are fine, and where they are of whole
seconds."""


@dataclass(frozen=True)
class InputFile:
    """A file that a run reads: a path that also knows where tensors lie.

    places  tensor -> (offset of its data, n_bytes); empty where they are not known
    fd      that the run reads it through, as long as it is open; None: there is only the path
    """

    path: Path
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)
    fd: int | None = field(default=None, repr=False, compare=False)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name


AnyInput = str | os.PathLike[str]
"""A path, or an InputFile, by which changes are noticed in every tensor."""


class Status(NamedTuple):
    """Status of a file in a file system; the same as long as nobody writes to the file or replaces it."""

    device: int
    inode: int
    n_bytes: int
    modified: int
    changed: int

    def may_hide_a_change(self, now: int) -> bool:
        """Whether a change right after `now` (nanoseconds since 1970) could leave this status as it is."""
        clock = _FINE_CLOCK if self.changed % 1_000_000_000 else _COARSE_CLOCK
        return now - self.changed < clock


@dataclass(frozen=True)
class Digest:
    """Digests of the bytes by which an input is recognised, as hexadecimal texts.

    start    of what stands before the tensors, and of the file's end
    tensors  of samples of each tensor
    """

    n_bytes: int
    start: str
    tensors: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.n_bytes, "tensors": dict(self.tensors), "start": self.start}

    def __str__(self) -> str:
        """Return all of it as one short text."""
        return f"{self.n_bytes} bytes, {_hash(self.start.encode(), *map(str.encode, self.tensors.values()))}"

    def difference(self, other: Digest) -> str | None:
        """Describe how another digest of the same file differs, for a message; None: they agree."""
        if self.n_bytes != other.n_bytes:
            return f"had {self.n_bytes:,} bytes, and has {other.n_bytes:,}"
        changed = [name for name, digest in self.tensors.items() if other.tensors.get(name) != digest]
        if changed:
            more = f" and {len(changed) - 1} more tensors hold" if len(changed) > 1 else " holds"
            return f"{shown(changed[0])}{more} other numbers"
        return None if self.start == other.start else "its header is different"


class InputWatch:
    """The inputs of a run as they are when this is made.

    A file that is open may be deleted or renamed: the run goes on with the one that it has.

    beside   files that must not change either, and that the run is recognised by in another way
    by_path  other processes open the inputs by their names, so these must go on standing for the same bytes
    digests  of each, by name
    raises   ChangedInput for a file that can't be read, or that changes while its samples are taken
    """

    def __init__(
        self, inputs: Iterable[AnyInput], beside: Iterable[AnyInput] = (), *, by_path: bool = False
    ) -> None:
        self._inputs = [_as_file(each, by_path) for each in inputs]
        self._files = [*self._inputs, *(_as_file(each, by_path) for each in beside)]
        self._looked_at = time.time_ns()
        seen = [_look_at(file) for file in self._files]
        self._seen = {file.path: status for file, (status, _) in zip(self._files, seen, strict=True)}
        self._digests = {file.path: digest for file, (_, digest) in zip(self._files, seen, strict=True)}

    @property
    def digests(self) -> dict[str, Digest]:
        return {file.name: self._digests[file.path] for file in self._inputs}

    def recognised_by(self) -> list[list[str]]:
        """Return name and digest of each file, short, as JSON data."""
        return [[file.name, str(self._digests[file.path])] for file in self._inputs]

    @property
    def state(self) -> bytes:
        """Status of all files, as bytes: other ones where a file may have changed meanwhile."""
        return repr([tuple(self._seen[file.path]) for file in self._inputs]).encode()

    def refuse_changed(self) -> None:
        """Raise ChangedInput, naming file and tensor, for the first input that holds other bytes by now.

        What has been read of the inputs before this call was then what the digests stand for.
        """
        looked_at, now = self._looked_at, time.time_ns()
        for file in self._files:
            path, before = file.path, self._seen[file.path]
            status = _status_of(file)
            if status == before and not before.may_hide_a_change(looked_at):
                continue
            status, digest = _look_at(file)
            difference = self._digests[path].difference(digest)
            if difference is not None:
                raise ChangedInput(
                    f"{path}: was changed while it was read ({difference}), so the run stops:"
                    " run the command again when no program writes to this file"
                )
            self._seen[path] = status
        self._looked_at = now


def _as_file(given: AnyInput, by_path: bool) -> InputFile:
    file = given if isinstance(given, InputFile) else InputFile(Path(given))
    return replace(file, fd=None) if by_path else file


def gguf_inputs(source: GGUFSet) -> tuple[InputFile, ...]:
    """Return the files of an open model."""
    return tuple(gguf_input(file) for file in source.shards)


def gguf_input(file: GGUFFile) -> InputFile:
    """Return an open file."""
    places = {name: (file.data_offset(name), info.n_bytes) for name, info in file.tensors.items()}
    return InputFile(file.path, places, file.fileno())


def _look_at(file: InputFile) -> tuple[Status, Digest]:
    """Return status and digest of a file that stays the same meanwhile."""
    status = _status_of(file)
    known = _known_digest if not status.may_hide_a_change(time.time_ns()) else _digest
    with ChangedInput.from_os(f"{file.path}: can't be read:"):
        digest = known(file, status, len(file.places))
    if _status_of(file) != status:
        raise ChangedInput(f"{file.path}: is being changed; run the command again after the change")
    return status, digest


def _status_of(file: InputFile) -> Status:
    with ChangedInput.from_os(f"{file.path}: can't be read any more:"):
        found = os.stat(file.path if file.fd is None else file.fd)
    if not stat.S_ISREG(found.st_mode):
        raise ChangedInput(f"{file.path}: is not a regular file")
    return Status(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _digest(file: InputFile, status: Status, n_places: int) -> Digest:
    """Return the digest of a file; raises OSError.

    status, n_places  so that `_known_digest` tells files apart
    """
    if file.fd is not None:
        return _digest_of_open(file.fd, file)
    fd = open_file(file.path, os.O_RDONLY | NO_WAIT)
    try:
        return _digest_of_open(fd, file)
    finally:
        os.close(fd)


_known_digest = lru_cache(maxsize=1024)(_digest)


def _digest_of_open(fd: int, file: InputFile) -> Digest:
    n_bytes = os.fstat(fd).st_size
    places = sorted(file.places.items(), key=lambda place: place[1])  # as a disk is read best
    begin = min((offset for _, (offset, _) in places), default=_START_BYTES)
    pieces = [(0, min(begin, _LARGEST_HEADER)), (max(0, n_bytes - PIECE_BYTES), PIECE_BYTES)]
    if not places:
        pieces += [(n_bytes * i // _FILE_PIECES, PIECE_BYTES) for i in range(1, _FILE_PIECES)]
    return Digest(n_bytes, _read_hash(fd, pieces), dict(_tensor_digests(fd, places)))


def _tensor_digests(fd: int, places: Sequence[_Place]) -> Iterator[tuple[str, str]]:
    def digests(first: int) -> list[tuple[str, str]]:
        return [
            (name, _read_hash(fd, [(offset + start, count) for start, count in sample_places(n_bytes)]))
            for name, (offset, n_bytes) in places[first : first + _A_FEW]
        ]

    firsts = range(0, len(places), _A_FEW)
    if len(firsts) <= 1:
        yield from chain.from_iterable(map(digests, firsts))
        return
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from chain.from_iterable(pool.map(digests, firsts))


def sample_places(n_bytes: int) -> list[tuple[int, int]]:
    """Return which bytes of a tensor's data are looked at, as (start, n_bytes), in order.

    >>> sample_places(100)
    [(0, 100)]
    >>> sample_places(10_000_000)
    [(0, 4096), (3331968, 4096), (6663936, 4096), (9995904, 4096)]
    """
    if n_bytes <= _WHOLE_BYTES:
        return [(0, n_bytes)]
    n_pieces = min(max(_LEAST_PIECES, n_bytes // _BYTES_OF_A_PIECE), _MOST_PIECES)
    last = n_bytes - PIECE_BYTES
    return [(last * i // (n_pieces - 1), PIECE_BYTES) for i in range(n_pieces)]


def _read_hash(fd: int, pieces: Iterable[tuple[int, int]]) -> str:
    return _hash(*(read_at(fd, n_bytes, offset) for offset, n_bytes in pieces))


def _hash(*pieces: bytes) -> str:
    digest = blake2b(digest_size=8)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
