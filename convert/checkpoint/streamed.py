"""A model on the Hub as a folder whose weights stay there: small files are here, shards read by ranges.

Of a shard only what is asked for is fetched, into memory. Large pieces are one request each. Small ones
(headers, norms, scales) come through blocks that are kept, because a file has tens of thousands of scales
side by side. Formats that keep rows of a weight in columns (GPTQ, AWQ) read a tensor again and again, so the
tensors read in this way are kept while they are in use.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from convert.checkpoint.safetensors_file import SafetensorsFile
from gguf_tools.errors import CheckpointError, HubError
from gguf_tools.findings import remark
from gguf_tools.hub.downloads import n_refused, note_refused
from gguf_tools.hub.ranges import Budget, InOrder, RemoteFile
from gguf_tools.text import shown

BLOCK_BYTES = 1 << 18
"""Size of the blocks that small pieces come through. Larger pieces are requests of their own."""

KEPT_BLOCK_BYTES = 16 << 20
"""Bytes of blocks that a file keeps."""

KEPT_TENSOR_BYTES = 256 << 20
"""Bytes of tensors read by columns that a file keeps; one larger than that is kept alone."""


class RemoteSafetensorsFile(SafetensorsFile):
    """A safetensors file on the Hub whose header has been fetched and checked; see SafetensorsFile.

    path   where the file would lie if it were fetched, for messages
    """

    def __init__(self, path: Path, remote: RemoteFile) -> None:
        self.path, self.size_bytes = path, remote.size_bytes
        self.remote = remote
        self._blocks, self._whole = Kept(KEPT_BLOCK_BYTES), Kept(KEPT_TENSOR_BYTES)
        self._load()

    def close(self) -> None:
        self._blocks, self._whole = Kept(KEPT_BLOCK_BYTES), Kept(KEPT_TENSOR_BYTES)

    def read_strided(self, offset: int, stride: int, out: np.ndarray, what: str) -> None:
        """Fill each row of `out`, uint8 and C-contiguous, from `offset` and every `stride` bytes after it."""
        tensor = self.tensors[what]
        n_rows, n_bytes = out.shape
        data = self._whole.get(tensor.offset, lambda: self.read(tensor.offset, tensor.n_bytes, what))
        first = offset - tensor.offset
        rows = np.lib.stride_tricks.as_strided(data[first:], (n_rows, n_bytes), (stride, 1), writeable=False)
        out[...] = rows

    def _read_into(self, offset: int, view: memoryview, what: str) -> None:
        if offset + len(view) > self.size_bytes:
            raise CheckpointError(
                f"{self.path}: {shown(what)}: the file ends at byte {self.size_bytes}, expected data up to"
                f" byte {offset + len(view)}; it is truncated"
            )
        if len(view) >= BLOCK_BYTES:
            self.remote.read_into(offset, view)
            return
        done = 0
        while done < len(view):
            start = (offset + done) // BLOCK_BYTES * BLOCK_BYTES
            block = self._blocks.get(start, lambda start=start: self._fetch(start))  # type: ignore[misc]
            piece = block[offset + done - start :][: len(view) - done]
            view[done : done + len(piece)] = memoryview(piece.data)
            done += len(piece)

    def _fetch(self, start: int) -> np.ndarray:
        block = np.empty(min(BLOCK_BYTES, self.size_bytes - start), np.uint8)
        self.remote.read_into(start, memoryview(block.data))
        return block


class Kept:
    """Arrays by their offset, up to so many bytes; the ones not used for longest go. Safe for threads."""

    def __init__(self, n_bytes: int) -> None:
        self._limit, self._n_bytes = n_bytes, 0
        self._arrays: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self._being_made: dict[int, threading.Lock] = {}

    def get(self, offset: int, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return an array that is kept, or what `make` returns; threads that want the same wait for one."""
        with self._lock:
            if offset in self._arrays:
                self._arrays.move_to_end(offset)
                return self._arrays[offset]
            making = self._being_made.setdefault(offset, threading.Lock())
        with making:
            with self._lock:
                if offset in self._arrays:
                    return self._arrays[offset]
            array = make()
            with self._lock:
                self._arrays[offset] = array
                self._n_bytes += array.nbytes
                while self._n_bytes > self._limit and len(self._arrays) > 1:
                    _, oldest = self._arrays.popitem(last=False)
                    self._n_bytes -= oldest.nbytes
                self._being_made.pop(offset, None)
        return array


_AT_ONCE = 8
"""How many headers are fetched at the same time."""


@dataclass(frozen=True)
class RemoteShard:
    """A safetensors file of a model.

    sha256  of its content, as the Hub knows it; None for a small file
    """

    name: str
    n_bytes: int
    sha256: str | None


@dataclass(frozen=True)
class StreamedFolder:
    """A folder with a model's small files, whose shards are on the Hub. It can be pickled.

    folder   in the cache
    commit   that all files are of
    shards   in reading order
    quiet    don't say which shards were checked
    """

    folder: Path
    repo: str
    commit: str
    shards: tuple[RemoteShard, ...]
    quiet: bool = field(default=False, compare=False)

    def __fspath__(self) -> str:
        return str(self.folder)

    def open_shards(self, opened: ExitStack) -> tuple[RemoteSafetensorsFile, ...]:
        """Open the shards, whose headers are fetched; raises HubError, CheckpointError."""
        budget = Budget()
        digests = [
            None
            if shard.sha256 is None
            else InOrder(shard.n_bytes, shard.sha256, budget, partial(self._refuse, shard))
            for shard in self.shards
        ]

        def open_shard(shard: RemoteShard, digest: InOrder | None) -> RemoteSafetensorsFile:
            remote = RemoteFile(self.repo, self.commit, shard.name, shard.n_bytes, digest)
            return RemoteSafetensorsFile(self.folder / shard.name, remote)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            files = tuple(pool.map(open_shard, self.shards, digests))
        for file in files:
            opened.enter_context(file)
        opened.callback(self._say_what_was_checked, digests)
        return files

    def recognised_by(self) -> dict[str, str]:
        """Return the identity of each shard: length, hash or commit, and how often it was refused.

        What was made of bytes that turned out to be others is not gone on with.
        """
        told = {}
        for shard in self.shards:
            known = f"{shard.n_bytes} bytes, {shard.sha256 or self.commit}"
            times = n_refused(self.repo, self.commit, shard.name)
            told[shard.name] = f"{known}, refused {times} times" if times else known
        return told

    def _refuse(self, shard: RemoteShard, found: str) -> None:
        note_refused(self.repo, self.commit, shard.name)
        raise HubError(
            f"{self.repo}: {shard.name}: the content that came is not the Hub's: its SHA-256 is {found}, the"
            f" Hub lists {shard.sha256}; what this run has made of it is of no use, so begin again with"
            " --restart"
        )

    def _say_what_was_checked(self, digests: list[InOrder | None]) -> None:
        """Say so when weights were read whose hash was not checked."""
        read = [each for each in digests if each is not None and 2 * each.n_seen >= each.n_bytes]
        n_checked = sum(each.is_checked for each in read)
        # A worker reads a part of each shard, and has nothing to say.
        if self.quiet or n_checked == len(read) or multiprocessing.parent_process() is not None:
            return
        remark(
            f"{self.repo}: SHA-256 checked of {n_checked} of {len(read)} shards; the others were not read"
            " completely, or not in order"
        )
