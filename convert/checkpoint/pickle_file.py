"""Pickle checkpoints (`.bin`, `.pt`), read without running their code.

A pickle is a program, and loading one runs it. Here an interpreter that can only describe tensors reads it;
see convert.checkpoint.torch_program. It says where in the file the numbers of a tensor lie, and they are read
from there when they are wanted, like those of a safetensors file.

Files from before torch 1.6 are no archives, and torch itself reads them, with weights_only=True. Its own
interpreter had holes, which were closed one by one, so an old torch is refused; and pickles are read only
when the user asks for it.

The file is a dictionary of tensors, or has one under "state_dict", "model" or "module". Offsets beyond the
end of the file stand for tensors that do not lie there row by row (views), and for those of files from before
torch 1.6, which are all in memory.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np

from convert.checkpoint.safetensors_file import DTYPE_BITS, MAX_HEADER_BYTES, RawTensor, SafetensorsFile
from convert.checkpoint.torch_program import Storage, Tensor, describe, type_name
from gguf_tools.errors import CheckpointError, UnsupportedCheckpoint
from gguf_tools.text import quoted, shown

OLDEST_TORCH = (2, 10)
_HOLDERS = ("state_dict", "model", "module")
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
    "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""Name in torch -> name in safetensors."""


class PickleFile(SafetensorsFile):
    """An open pickle checkpoint, which is read like a safetensors file.

    raises   UnsupportedCheckpoint for anything but tensors, and without a torch that is new enough for a file
             from before torch 1.6; CheckpointError for a file that can't be read
    """

    def _load(self) -> None:
        self.metadata = MappingProxyType({})
        self._places: dict[str, tuple[int, int]] = {}
        self._elsewhere: dict[str, Callable[[], np.ndarray]] = {}
        is_archive = self.read(0, min(self.size_bytes, len(_ARCHIVE)), "header").tobytes() == _ARCHIVE
        tensors = self._of_archive() if is_archive else self._in_memory()
        stored: dict[str, RawTensor] = {}
        behind = self.size_bytes
        for name, tensor in tensors.items():
            offset = behind
            if name in self._places and name not in self._elsewhere:
                offset = self._places[name][0]
            stored[name] = RawTensor(name, _DTYPES[tensor.dtype], tensor.shape, offset, self)
            if name in self._elsewhere:
                behind += stored[name].n_bytes
        self.tensors = MappingProxyType(stored)

    def close(self) -> None:
        super().close()
        self._elsewhere = {}

    def places(self) -> dict[str, tuple[int, int]]:
        """Return where in the file the bytes of each tensor lie; of files before torch 1.6 it isn't known."""
        return dict(self._places)

    def _read_into(self, offset: int, view: memoryview, what: str) -> None:
        if what not in self._elsewhere:
            super()._read_into(offset, view, what)
            return
        start = offset - self.tensors[what].offset
        view[:] = memoryview(self._elsewhere[what]()[start : start + len(view)].data)

    def _of_archive(self) -> dict[str, Tensor]:
        """Return the tensors of a file since torch 1.6, and note where they lie."""
        folder, records = _records(self.path)
        program = self._record(f"{folder}/data.pkl", records)
        order = f"{folder}/byteorder"
        if order in records and self._record(order, records) != b"little":
            raise UnsupportedCheckpoint(f"{self.path}: was written on a big-endian machine")
        try:
            value = describe(program)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: can't be read as weights only: {str(error)[:200]}"
            ) from error
        tensors: dict[str, Tensor] = _by_name(self.path, value, Tensor)
        for name, tensor in tensors.items():
            _check(self.path, name, tensor)
            if prod(tensor.shape):
                self._places[name] = self._place(name, tensor, folder, records)
                if not tensor.is_contiguous():
                    self._elsewhere[name] = partial(self._in_order, name, tensor)
        return tensors

    def _record(self, name: str, records: Mapping[str, tuple[int, int]]) -> bytes:
        """Return the bytes of a record."""
        offset, n_bytes = records.get(name, (0, 0))
        if not 0 < n_bytes <= MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self.path}: {shown(name)} is not in the file as torch stores it, with up to"
                f" {MAX_HEADER_BYTES} bytes; the file is damaged, or compressed"
            )
        return self.read(offset, n_bytes, name).tobytes()

    def _place(
        self, name: str, tensor: Tensor, folder: str, records: Mapping[str, tuple[int, int]]
    ) -> tuple[int, int]:
        """Return where the bytes from the tensor's first number to its last lie: (offset, n_bytes)."""
        assert tensor.storage is not None
        size = _size_of(tensor)
        first = tensor.offset * size
        strides = zip(tensor.shape, tensor.strides, strict=True)
        n_bytes = (1 + sum((n - 1) * stride for n, stride in strides)) * size
        begin, found = records.get(f"{folder}/data/{tensor.storage.key}", (0, 0))
        if max(first + n_bytes, tensor.storage.n_bytes) > found:
            raise CheckpointError(
                f"{self.path}: {shown(name)}: its {n_bytes} bytes are not in the file as torch stores them;"
                " it is damaged, or its numbers are compressed"
            )
        return begin + first, n_bytes

    def _in_order(self, name: str, tensor: Tensor) -> np.ndarray:
        """Return the bytes of a view of numbers that lie in another order, row by row."""
        size = _size_of(tensor)
        span = np.empty(self._places[name][1], np.uint8)
        super()._read_into(self._places[name][0], memoryview(span.data), name)
        strides = *(stride * size for stride in tensor.strides), 1
        view = np.lib.stride_tricks.as_strided(span, (*tensor.shape, size), strides, writeable=False)
        return np.ascontiguousarray(view).reshape(-1)

    def _in_memory(self) -> dict[str, Tensor]:
        """Return the tensors of a file from before torch 1.6, which torch has read."""
        torch = _trusted_torch(self.path)
        try:
            value = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:
            # What torch raises for a damaged or a hostile file is of many types (UnpicklingError, EOFError,
            # RuntimeError, ValueError ...) and of many lines.
            text = str(error).strip().splitlines()
            reason = text[0][:200] if text else type(error).__name__
            raise CheckpointError(f"{self.path}: torch can't read it as weights only: {reason}") from error
        tensors = {}
        for name, tensor in _by_name(self.path, value, torch.Tensor).items():
            tensors[name] = _described(tensor)
            _check(self.path, name, tensors[name])
            self._elsewhere[name] = partial(_bytes_of, tensor)
        return tensors


_ARCHIVE = b"PK\x03\x04"
"""How a zip file begins."""

_LOCAL_HEADER = struct.Struct("<26xHH")


def _records(path: Path) -> tuple[str, dict[str, tuple[int, int]]]:
    """Return the folder in a file of torch, and offset and bytes of each record by its name; those that are
    compressed have no bytes.

    raises  CheckpointError for a damaged file
    """
    records = {}
    try:
        with ZipFile(path) as archive, path.open("rb") as file:
            for entry in archive.infolist():
                file.seek(entry.header_offset)
                name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                offset = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
                records[entry.filename] = offset, entry.file_size if entry.compress_type == ZIP_STORED else 0
            folder = archive.namelist()[0].partition("/")[0]
    except (BadZipFile, OSError, struct.error, IndexError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: damaged, or no file of torch: {error}") from error
    return folder, records


def _by_name(path: Path, value: Any, kind: type) -> dict[str, Any]:
    """Return the tensors, which are of this kind, from what a pickle makes; raises UnsupportedCheckpoint."""
    holder = next(
        (key for key in _HOLDERS if isinstance(value, dict) and isinstance(value.get(key), dict)), None
    )
    tensors = value if holder is None else value[holder]
    if not isinstance(tensors, dict):
        raise UnsupportedCheckpoint(f"{path}: holds {type_name(tensors)}, expected tensors by name")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, kind):
            raise UnsupportedCheckpoint(
                f"{path}: {quoted(name)} is {type_name(tensor)}, expected tensors by name"
            )
    return dict(tensors)


def _check(path: Path, name: str, tensor: Tensor) -> None:
    """Raise UnsupportedCheckpoint for a tensor that is more than plain numbers."""
    if tensor.storage is None:
        raise UnsupportedCheckpoint(f"{path}: {quoted(name)} is nested, sparse or without data")
    if tensor.dtype not in _DTYPES:
        raise UnsupportedCheckpoint(
            f"{path}: {shown(name)}: elements of type {shown(f'torch.{tensor.dtype}')} can't be read"
        )
    if prod(tensor.shape) * _size_of(tensor) > tensor.storage.n_bytes:
        raise UnsupportedCheckpoint(f"{path}: {quoted(name)} has more elements than are stored")
    if tensor.is_view:
        raise UnsupportedCheckpoint(
            f"{path}: {shown(name)}: a nested, sparse or negated tensor, expected plain numbers"
        )


def _size_of(tensor: Tensor) -> int:
    """Return the bytes of an element."""
    return DTYPE_BITS[_DTYPES[tensor.dtype]] // 8


# ---- files from before torch 1.6


def _trusted_torch(path: Path) -> Any:
    """Return torch; raises UnsupportedCheckpoint for none, and for one with known holes."""
    try:
        import torch
    except ImportError:
        raise UnsupportedCheckpoint(
            f"{path}: reading a pickle from before torch 1.6 needs torch: pip install 'gguf-tools[torch]', or"
            " '.[torch]' in a clone"
        ) from None
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if version < OLDEST_TORCH:
        raise UnsupportedCheckpoint(
            f"{path}: torch {torch.__version__} can be tricked into running a pickle's code, expected"
            f" {'.'.join(map(str, OLDEST_TORCH))} or newer"
        )
    return torch


def _described(tensor: Any) -> Tensor:
    """Return torch's tensor as a pickle describes one, but for the place of its numbers."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested or tensor.layout != torch.strided or tensor.device.type != "cpu":
        return Tensor(dtype, None)
    storage = Storage(dtype, "", tensor.untyped_storage().nbytes())
    return Tensor(dtype, storage, shape=tuple(tensor.shape), is_view=tensor.is_neg())


def _bytes_of(tensor: Any) -> np.ndarray:
    """Return the bytes of a tensor in memory, uint8."""
    import torch

    data: np.ndarray = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return data
