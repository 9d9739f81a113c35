"""A safetensors file on the Hub, of which only what is asked for is fetched, into memory.

Large pieces are one request each. Small ones (headers, norms, scales) come through blocks that are kept,
because a file has tens of thousands of scales side by side. Formats that keep rows of a weight in columns
(GPTQ, AWQ) read a tensor again and again, so the tensors read in this way are kept while they are in use.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from convert.checkpoint.safetensors_file import SafetensorsFile
from gguf_tools.errors import CheckpointError
from gguf_tools.hub.ranges import RemoteFile
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
        self._blocks, self._whole = _Kept(KEPT_BLOCK_BYTES), _Kept(KEPT_TENSOR_BYTES)
        self._load()

    def close(self) -> None:
        self._blocks, self._whole = _Kept(KEPT_BLOCK_BYTES), _Kept(KEPT_TENSOR_BYTES)

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


class _Kept:
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
