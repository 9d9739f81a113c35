"""One safetensors file: a checked header, and row ranges of its tensors.

The format, as its README gives it:

    8 bytes      N, length of the header, unsigned, little endian
    N bytes      JSON, beginning with "{": {NAME: {"dtype", "shape", "data_offsets": [begin, end]}, ...},
                 and optionally "__metadata__": {string: string}; may be padded with spaces
    the rest     the data; offsets count from its first byte, elements are little endian, rows last

These are refused, each with a message of one line: a file shorter than its header says; a header that is not
such JSON, or would take much memory; a name given twice; an unknown dtype; a negative or non-integer size; a
range that disagrees with shape and dtype; and data with holes, overlaps or a tail, which the format forbids
so that no file can be read in two ways.

The safetensors library isn't used, because it returns a row range of BF16 or FP8 only through torch. Nor is
mmap. It saves a copy, but the pages it touches count as the process's memory until the kernel reclaims them,
so a conversion would seem to need as much memory as the model; and a file that is truncated while it is read
kills the process with SIGBUS. `pread` into the returned array costs exactly one copy, at memory speed. Memory
stays bounded by the size of the request, the call is thread-safe because it has no file position, it drops
the GIL, and a short read is an error like any other.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from gguf_tools.errors import CheckpointError, UnsupportedCheckpoint
from gguf_tools.files.documents import parse_json
from gguf_tools.system.files import NO_WAIT, Closing, fill, open_file
from gguf_tools.text import quoted, shown

# The library's own limit for a header: beyond it a file is damaged or hostile.
MAX_HEADER_BYTES = 100_000_000

# Pieces that lie no further apart are read with what is between them, a block at a time: a call of the system
# takes as long as copying 16 KiB.
SHORT_STRIDE_BYTES = 16 * 1024
STRIDED_BLOCK_BYTES = 512 * 1024

DTYPE_BITS: Mapping[str, int] = MappingProxyType({
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
})  # fmt: skip

NUMPY_DTYPES: Mapping[str, np.dtype] = MappingProxyType({
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("<u1"), "I8": np.dtype("<i1"), "U16": np.dtype("<u2"), "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"), "I32": np.dtype("<i4"), "U64": np.dtype("<u8"), "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz), "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "C64": np.dtype("<c8"),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor as it is stored, unread.

    dtype    the safetensors name: "BF16", "F8_E4M3", "I32" ...
    shape    rows first; a row is the last axis, rows are counted over all the axes before it
    offset   byte offset of the first element, counted as `file` counts
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    file: SafetensorsFile = field(repr=False, compare=False)

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def n_cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def n_rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop` in the storage dtype, (stop - start, n_cols), freshly allocated.

        raises  CheckpointError when the file has become shorter or unreadable,
                UnsupportedCheckpoint for the dtypes of less than a byte
        """
        if not 0 <= start <= stop <= self.n_rows:
            raise IndexError(f"{self.name}: rows {start}..{stop} of {self.n_rows}")
        dtype = self._numpy_dtype()
        row_bytes = self.n_cols * dtype.itemsize
        data = self.file.read(self.offset + start * row_bytes, (stop - start) * row_bytes, self.name)
        return data.view(dtype).reshape(stop - start, self.n_cols)

    def read(self) -> np.ndarray:
        """Return the whole tensor in its shape; meant for scales, zero points and other small ones."""
        return self.read_rows(0, self.n_rows).reshape(self.shape)

    def read_columns(self, start: int, stop: int) -> np.ndarray:
        """Return columns `start` to `stop` of all rows in the storage dtype, (n_rows, stop - start).

        Formats that pack along the input keep a row range of the weight in a column range.
        """
        if not 0 <= start <= stop <= self.n_cols:
            raise IndexError(f"{self.name}: columns {start}..{stop} of {self.n_cols}")
        if stop - start == self.n_cols:
            return self.read_rows(0, self.n_rows)
        dtype = self._numpy_dtype()
        out = np.empty((self.n_rows, stop - start), dtype)
        row_bytes = self.n_cols * dtype.itemsize
        first = self.offset + start * dtype.itemsize
        self.file.read_strided(first, row_bytes, out.view(np.uint8), self.name)
        return out

    def read_elements(self, start: int, stop: int) -> np.ndarray:
        """Return elements `start` to `stop`, counted over the whole tensor, in the storage dtype, 1-D."""
        if not 0 <= start <= stop <= prod(self.shape):
            raise IndexError(f"{self.name}: elements {start}..{stop} of {prod(self.shape)}")
        dtype = self._numpy_dtype()
        size = dtype.itemsize
        return self.file.read(self.offset + start * size, (stop - start) * size, self.name).view(dtype)

    def _numpy_dtype(self) -> np.dtype:
        dtype = NUMPY_DTYPES.get(self.dtype)
        if dtype is None:
            raise UnsupportedCheckpoint(
                f"{self.path}: {shown(self.name)}: elements of type {self.dtype} can't be read"
            )
        return dtype


class SafetensorsFile(Closing):
    """An open safetensors file whose header has been checked. Close it, or use it in a with-block.

    path, size_bytes   the file
    tensors            name -> RawTensor, in the order of the data
    metadata           the strings of "__metadata__"
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with CheckpointError.from_os(f"{path}:"):
            # Opening a pipe must not wait for a writer.
            self._fd = open_file(path, os.O_RDONLY | NO_WAIT)
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: not a regular file")
            self.size_bytes = status.st_size
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        """Read and check the header."""
        header, data_start = self._read_header()
        self.metadata: Mapping[str, str] = MappingProxyType(
            _metadata(self.path, header.pop("__metadata__", {}))
        )
        self.tensors: Mapping[str, RawTensor] = MappingProxyType(self._parse(header, data_start))

    def close(self) -> None:
        fd, self._fd = self._fd, -1  # an interruption must not have it closed twice
        if fd >= 0:
            os.close(fd)

    def fileno(self) -> int:
        """Return the descriptor of a file on this machine."""
        return self._fd

    def places(self) -> dict[str, tuple[int, int]]:
        """Return where in the file the bytes of each tensor lie: (offset, n_bytes)."""
        return {name: (tensor.offset, tensor.n_bytes) for name, tensor in self.tensors.items()}

    def read(self, offset: int, n_bytes: int, what: str) -> np.ndarray:
        """Return `n_bytes` bytes from the absolute `offset` as uint8, newly made; `what` is for errors."""
        out = np.empty(n_bytes, np.uint8)
        self._read_into(offset, memoryview(out.data), what)
        return out

    def read_strided(self, offset: int, stride: int, out: np.ndarray, what: str) -> None:
        """Fill each row of `out`, uint8 and C-contiguous, from `offset` and every `stride` bytes after it."""
        n_rows, n_bytes = out.shape
        if stride > SHORT_STRIDE_BYTES:
            for row in range(n_rows):
                self._read_into(offset + row * stride, memoryview(out[row].data), what)
            return
        step = max(1, STRIDED_BLOCK_BYTES // max(1, stride))
        block = np.empty((min(step, n_rows), stride), np.uint8)
        for row in range(0, n_rows, step):
            rows = min(step, n_rows - row)
            # What follows the last piece may be beyond the end of the file.
            wanted = memoryview(block.reshape(-1).data)[: (rows - 1) * stride + n_bytes]
            self._read_into(offset + row * stride, wanted, what)
            out[row : row + rows] = block[:rows, :n_bytes]

    def _read_into(self, offset: int, view: memoryview, what: str) -> None:
        with CheckpointError.from_os(f"{self.path}: {shown(what)}:"):
            n_read = fill(self._fd, view, offset)
        if n_read < len(view):
            raise CheckpointError(
                f"{self.path}: {shown(what)}: the file ends at byte {offset + n_read}, expected data up to"
                f" byte {offset + len(view)}; it is truncated"
            )

    def _read_header(self) -> tuple[dict[str, Any], int]:
        if self.size_bytes < 8:
            raise CheckpointError(f"{self.path}: {self.size_bytes} bytes, too short for a safetensors file")
        length = int.from_bytes(self.read(0, 8, "header").tobytes(), "little")
        if length > self.size_bytes - 8:
            raise CheckpointError(
                f"{self.path}: the header is said to take {length} bytes, but the file has {self.size_bytes}"
                " bytes; it is truncated, or no safetensors file"
            )
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self.path}: the header is said to take {length} bytes, expected at most {MAX_HEADER_BYTES}"
            )
        text = self.read(8, length, "header").tobytes()
        try:
            header = parse_json(text, _without_duplicates)
        except _DuplicateKeyError as error:
            raise CheckpointError(f"{self.path}: {shown(str(error))} appears twice in the header") from None
        except ValueError as error:
            raise CheckpointError(f"{self.path}: the header is not JSON ({error})") from error
        if not text.startswith(b"{") or not isinstance(header, dict):
            raise CheckpointError(f"{self.path}: the header is not a JSON object")
        return header, 8 + length

    def _parse(self, header: dict[str, Any], data_start: int) -> dict[str, RawTensor]:
        ranges = sorted(
            ((*_range(self.path, name, entry), name, entry) for name, entry in header.items()),
            key=lambda item: item[:2],
        )
        tensors = {}
        position, previous = 0, "the header"
        for begin, end, name, entry in ranges:
            if begin != position:
                what = "a hole" if begin > position else "an overlap"
                raise CheckpointError(
                    f"{self.path}: {shown(name)}: data begins at {begin}, expected {position}:"
                    f" {what} after {shown(previous)}"
                )
            tensors[name] = RawTensor(name, entry["dtype"], tuple(entry["shape"]), data_start + begin, self)
            position, previous = end, name
        found = self.size_bytes - data_start
        if position > found:
            cut = next(name for _, end, name, _ in ranges if end > found)
            raise CheckpointError(
                f"{self.path}: {shown(cut)}: cut off: the file has {found} bytes of data,"
                f" expected {position}; it is truncated"
            )
        if position < found:
            raise CheckpointError(
                f"{self.path}: {found} bytes of data, expected {position}: a tail after {shown(previous)}"
            )
        return tensors


def _range(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """Return begin and end of one header entry after checking it in itself."""
    where = f"{path}: {shown(name)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where}: the header entry needs dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{where}: unknown dtype {quoted(dtype)}, expected one of {', '.join(DTYPE_BITS)}"
        )
    if not _are_sizes(shape):
        raise CheckpointError(f"{where}: shape {shown(str(shape))} is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: data_offsets {shown(str(offsets))} are not two offsets")
    begin, end = offsets
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        raise CheckpointError(
            f"{where}: {end - begin} bytes of data, expected {bits / 8:.15g} for {dtype} of shape"
            f" {tuple(shape)}"
        )
    return begin, end


def _are_sizes(value: Any) -> bool:
    # 16 axes are beyond any checkpoint; the bound keeps a hostile list from becoming a product of millions.
    return (
        isinstance(value, list)
        and len(value) <= 16
        and all(type(item) is int and 0 <= item < 2**63 for item in value)
    )


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise CheckpointError(f"{path}: __metadata__ in the header is not a mapping of strings to strings")
    return value


class _DuplicateKeyError(Exception):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKeyError(key)
        found[key] = value
    return found
