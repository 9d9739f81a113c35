"""A GGUF file open for reading: header decoded, data read or memory-mapped.

Opening reads the header and checks where every tensor's data lie; no tensor data are touched. See
header.py for the format and for what is refused. The header is read and not mapped, because a map of a
file that another program shortens kills the process.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from abc import abstractmethod
from io import FileIO
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_tools.errors import FormatError, MissingModel, ShapeError, TruncatedError, UnreadableInput
from gguf_tools.format.block_layouts import swap_bytes
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.header import Endian, check_data, read_header
from gguf_tools.format.shown import types_table
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from gguf_tools.system.files import Closing, fill, read_at

if TYPE_CHECKING:  # numpy takes longer to import than a header to read
    import numpy as np


class GGUFSource(Closing):
    """A single file, or a split set: what is in it, and its tensors' data.

    path        as given
    paths       the files, in order
    version     2 or 3
    endian      byte order of the header's numbers and of the data: "little" or "big"
    alignment   alignment of tensor data
    metadata    key -> Value, in file order
    tensors     name -> TensorInfo, in file order
    size_bytes  size when it was opened

    Methods that take a tensor's name raise FormatError if there is no such tensor. Close it, or use it as a
    context manager; arrays that `raw` and `raw_rows` returned stay valid.
    """

    path: Path
    version: int
    endian: Endian
    alignment: int
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    size_bytes: int

    @property
    @abstractmethod
    def paths(self) -> list[Path]: ...

    @abstractmethod
    def file_of(self, name: str) -> GGUFFile:
        """Return the file that holds a tensor; raises FormatError if none does."""

    def _repr_html_(self) -> str:
        return types_table(repr(self), self.tensors.values())

    def get(self, key: str, default: Any = None) -> Any:
        """Return the plain data of a metadata value, arrays as tuples; `default` if there is no such key."""
        value = self.metadata.get(key)
        return default if value is None else value.plain

    def tensor(self, name: str) -> TensorInfo:
        """Return the tensor of this name; raises FormatError if there is none."""
        return self.file_of(name).tensors[name]

    def data_offset(self, name: str) -> int:
        """Return where in its own file (`file_of`) a tensor's data begin."""
        return self.file_of(name)._offsets[name]

    def values(self, name: str) -> np.ndarray:
        """Decode a tensor, whatever its type is: float32, in its shape. Its bytes are `raw` and `blocks`.

        raises  FormatError for a tensor that isn't there, QuantError for a type without a decoder
        """
        from gguf_tools import read_values  # asked of the package: decoders are on a floor above this one

        return read_values(self, name)

    def raw(self, name: str) -> np.ndarray:
        """Return a tensor's data as uint8 (n_bytes,), a read-only view of the map."""
        return self.file_of(name)._view(self.data_offset(name), self.tensor(name).n_bytes)

    def array(self, name: str) -> np.ndarray:
        """Return a tensor of plain numbers as an array of its shape and dtype (BF16: that of ml_dtypes).

        raises  FormatError for a quantized tensor: `values` decodes it, `blocks` has its bytes
        """
        info = self.tensor(name)
        if not is_plain(info.type):
            raise FormatError(
                f"{self.file_of(name).path}: tensor {name!r} is quantized to {info.type.name}; its values are"
                f" file.values({name!r}), its bytes file.blocks({name!r})"
            )
        return self.blocks(name)

    def blocks(self, name: str) -> np.ndarray:
        """Return a tensor as it is stored, in new memory: uint8 (..., row_bytes), or an array of its numbers.

        `quantize.decode(blocks, type)` turns bytes into float32.
        raises  FormatError for blocks whose order on big-endian machines is not known
        """
        return as_array(self.tensor(name), self.read_bytes(name, 0, self.tensor(name).n_bytes), self.endian)

    def raw_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows start..stop, counted over all matrices: uint8 (n_bytes,), a read-only view of the map.

        raises  ShapeError if there are no such rows, or if they cut a group of interleaved rows
        """
        file = self.file_of(name)
        return file._view(*file._row_range(name, start, stop))

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows start..stop like `raw_rows`, but read into a new array.

        Use it to go through whole models. Pages of a map count as this process's memory, and a process that
        maps a file crashes when another program shortens it; here that is an error.
        raises  ShapeError like `raw_rows`, TruncatedError if the file has become shorter
        """
        file = self.file_of(name)
        return file._read(name, *file._row_range(name, start, stop))

    def read_bytes(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return bytes start..stop of a tensor's data, fewer at its end, as a new array; see `read_rows`."""
        stop = min(stop, self.tensor(name).n_bytes)
        return self.file_of(name)._read(name, self.data_offset(name) + start, stop - start)


def _opened(path: Path) -> FileIO:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise UnreadableInput(f"{path}: is a folder, expected a file")
        if not stat.S_ISREG(mode):  # opening a pipe would wait for its writer
            raise FormatError(f"{path}: not a regular file")
        return open(path, "rb", buffering=0)
    except FileNotFoundError as error:
        raise MissingModel(f"{path}: {error.strerror}") from error
    except UnreadableInput:
        raise
    except OSError as error:
        raise UnreadableInput(f"{path}: {error.strerror}") from error


class GGUFFile(GGUFSource):
    """One GGUF file.

    header_bytes  size of the header, without padding
    data_start    where the data begin

    Raises UnreadableInput, an OSError, if the file can't be read, and FormatError, TruncatedError or
    UnsupportedVersion if its header can't be right.

    >>> with GGUFFile("model-bf16.gguf") as file:
    ...     file.values("blk.0.ffn_down.weight").dtype, file.raw("blk.0.ffn_down.weight").dtype
    (dtype('float32'), dtype('uint8'))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._stream = _opened(self.path)
        self._map: mmap | None = None
        try:
            self.size_bytes = os.fstat(self._stream.fileno()).st_size
            if not self.size_bytes:
                raise TruncatedError(f"{self.path}: the file is empty")
            fd = self.fileno()
            header = read_header(lambda at, n: read_at(fd, n, at), self.size_bytes, str(self.path))
            check_data(header, self.size_bytes, str(self.path))
        except BaseException:
            self.close()
            raise
        self.version = header.version
        self.endian = header.endian
        self.alignment = header.alignment
        self.metadata = header.metadata
        self.tensors = header.tensors
        self.header_bytes = header.n_bytes
        self.data_start = header.data_start
        self._offsets = {
            name: header.data_start + offset
            for name, offset in zip(header.tensors, header.offsets, strict=True)
        }

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}: {len(self.tensors)} tensors, {len(self.metadata)} keys>"

    def close(self) -> None:
        if self._map is not None:
            with contextlib.suppress(BufferError):  # arrays still look at it; it goes with the last of them
                self._map.close()
            self._map = None
        self._stream.close()

    @property
    def paths(self) -> list[Path]:
        """The path of the file, as a list, because a split set has several."""
        return [self.path]

    def file_of(self, name: str) -> GGUFFile:
        """Return the file that holds a tensor: this one. Raises FormatError if it doesn't."""
        if name not in self.tensors:
            raise FormatError(f"{self.path}: no tensor {name!r}")
        return self

    def fileno(self) -> int:
        """Return the descriptor, for copies that the kernel makes."""
        return self._stream.fileno()

    def _read(self, name: str, offset: int, n_bytes: int) -> np.ndarray:
        import numpy as np

        data = np.empty(n_bytes, np.uint8)
        n_read = fill(self.fileno(), data.data, offset)
        if n_read < n_bytes:
            raise TruncatedError(
                f"{self.path}: tensor {name!r} ends at byte {offset + n_read}, {n_bytes - n_read} bytes"
                " early; the file has become shorter since it was opened"
            )
        return data

    def _row_range(self, name: str, start: int, stop: int) -> tuple[int, int]:
        info = self.tensor(name)
        if not 0 <= start <= stop <= info.n_rows:
            raise ShapeError(f"{self.path}: tensor {name!r} has {info.n_rows} rows, not {start} to {stop}")
        group = info.type.rows_interleaved
        if start % group or (stop % group and stop != info.n_rows):
            raise ShapeError(
                f"{self.path}: tensor {name!r} is {info.type.name}, whose rows come in groups of {group}; "
                f"rows {start} to {stop} cut one"
            )
        return self._offsets[name] + start * info.row_bytes, (stop - start) * info.row_bytes

    def _view(self, offset: int, n_bytes: int) -> np.ndarray:
        import numpy as np

        if self._stream.closed:
            raise ValueError(f"{self.path} is closed")
        if self._map is None:
            try:
                self._map = mmap(self.fileno(), self.size_bytes, access=ACCESS_READ)
            except ValueError:
                raise TruncatedError(f"{self.path}: has become shorter since it was opened") from None
        return np.frombuffer(self._map, np.uint8, n_bytes, offset)


_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}


def is_plain(type_: GGMLType) -> bool:
    """Return whether a type is one of plain numbers, not of blocks."""
    return type_.name == "BF16" or type_.name in _DTYPES


def as_array(info: TensorInfo, data: np.ndarray, endian: Endian) -> np.ndarray:
    """Return the data of a tensor as an array of its shape, see GGUFFile.blocks.

    data  uint8 (n_bytes,), in the byte order `endian`
    """
    import numpy as np

    if endian != sys.byteorder:
        data = swap_bytes(info.type, data)
    if info.type.name == "BF16":
        import ml_dtypes

        return data.view(ml_dtypes.bfloat16).reshape(info.shape)
    if info.type.name in _DTYPES:
        return data.view(np.dtype(_DTYPES[info.type.name])).reshape(info.shape)
    return data.reshape(*info.shape[:-1], -1)
