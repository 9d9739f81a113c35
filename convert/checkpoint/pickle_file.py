"""Pickle checkpoints (`.bin`, `.pt`), read by torch without running their code.

A pickle is a program, and loading one runs it. torch.load with weights_only=True instead runs a small
interpreter that builds tensors and containers and refuses everything else. That interpreter had holes, which
were closed one by one. So an old torch is refused, and pickles are read only when the user asks for it.

The file is a dictionary of tensors, or has one under "state_dict", "model" or "module". torch says where in
the file the numbers of a tensor lie, and they are read from there when they are wanted, like those of a
safetensors file. torch would map them, and a map kills the process when the file is truncated meanwhile.
Offsets beyond the end of the file stand for tensors that do not lie there row by row (views), and for those
of files from before torch 1.6, which are all in memory.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor, SafetensorsFile
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

    raises   UnsupportedCheckpoint without a torch that is new enough, and for anything but tensors;
             CheckpointError for a file that torch can't read
    """

    def _load(self) -> None:
        self.metadata = MappingProxyType({})
        self._places: dict[str, tuple[int, int]] = {}
        self._elsewhere: dict[str, Callable[[], np.ndarray]] = {}
        records = _records(self.path) if is_zipfile(self.path) else None
        tensors: dict[str, RawTensor] = {}
        behind = self.size_bytes
        for name, tensor in _tensors(self.path, in_memory=records is None).items():
            dtype = self._dtype_of(name, tensor)
            if records is None:
                self._elsewhere[name] = lambda tensor=tensor: _bytes_of(tensor)  # type: ignore[misc]
            elif tensor.numel():
                self._places[name] = place = self._place(name, tensor, records)
                if not tensor.is_contiguous():
                    self._elsewhere[name] = lambda name=name, tensor=tensor: self._in_order(name, tensor)  # type: ignore[misc]
            offset = behind if name in self._elsewhere or not tensor.numel() else place[0]
            tensors[name] = RawTensor(name, dtype, tuple(tensor.shape), offset, self)
            if name in self._elsewhere:
                behind += tensors[name].n_bytes
        self.tensors = MappingProxyType(tensors)

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

    def _dtype_of(self, name: str, tensor: Any) -> str:
        """Return the name of the tensor's type in safetensors; raises UnsupportedCheckpoint."""
        import torch

        dtype = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise UnsupportedCheckpoint(
                f"{self.path}: {shown(name)}: elements of type {tensor.dtype} can't be read"
            )
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_neg():
            raise UnsupportedCheckpoint(
                f"{self.path}: {shown(name)}: a nested, sparse or negated tensor, expected plain numbers"
            )
        return dtype

    def _place(self, name: str, tensor: Any, records: Mapping[int, int]) -> tuple[int, int]:
        """Return where the bytes from the tensor's first number to its last lie: (offset, n_bytes)."""
        size = tensor.element_size()
        begin = tensor.untyped_storage()._checkpoint_offset
        first = tensor.storage_offset() * size
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        n_bytes = (1 + sum((n - 1) * stride for n, stride in strides)) * size
        if begin not in records or first + n_bytes > records[begin]:
            raise CheckpointError(
                f"{self.path}: {shown(name)}: its {n_bytes} bytes are not in the file as torch stores them;"
                " it is damaged, or its numbers are compressed"
            )
        return begin + first, n_bytes

    def _in_order(self, name: str, tensor: Any) -> np.ndarray:
        """Return the bytes of a view of numbers that lie in another order, row by row."""
        size = tensor.element_size()
        span = np.empty(self._places[name][1], np.uint8)
        super()._read_into(self._places[name][0], memoryview(span.data), name)
        strides = *(stride * size for stride in tensor.stride()), 1
        view = np.lib.stride_tricks.as_strided(span, (*tensor.shape, size), strides, writeable=False)
        return np.ascontiguousarray(view).reshape(-1)


_LOCAL_HEADER = struct.Struct("<26xHH")


def _records(path: Path) -> dict[int, int]:
    """Return how many bytes each record of a file of torch has, by its offset; those that are compressed have
    none.

    raises  CheckpointError for a damaged file, UnsupportedCheckpoint for one of a big-endian machine
    """
    records = {}
    try:
        with ZipFile(path) as archive, path.open("rb") as file:
            for entry in archive.infolist():
                is_order = entry.filename.endswith("/byteorder") and entry.file_size < 100
                if is_order and archive.read(entry) != b"little":
                    raise UnsupportedCheckpoint(f"{path}: was written on a big-endian machine")
                file.seek(entry.header_offset)
                name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                offset = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
                records[offset] = entry.file_size if entry.compress_type == ZIP_STORED else 0
    except (BadZipFile, OSError, struct.error, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: damaged, or no file of torch: {error}") from error
    return records


def _bytes_of(tensor: Any) -> np.ndarray:
    """Return the bytes of a tensor in memory, uint8."""
    import torch

    data: np.ndarray = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


def _tensors(path: Path, *, in_memory: bool) -> dict[str, Any]:
    """Return the tensors of the pickle at `path` by name.

    in_memory  with their numbers; otherwise their storage says where in the file these are
    """
    try:
        import torch
    except ImportError:
        raise UnsupportedCheckpoint(
            f"{path}: reading a pickle needs torch: pip install 'gguf-tools[torch]', or '.[torch]' in a clone"
        ) from None
    from torch._subclasses.fake_tensor import FakeTensorMode  # torch documents it under this name alone

    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if version < OLDEST_TORCH:
        raise UnsupportedCheckpoint(
            f"{path}: torch {torch.__version__} can be tricked into running a pickle's code, expected"
            f" {'.'.join(map(str, OLDEST_TORCH))} or newer"
        )
    try:
        with nullcontext() if in_memory else FakeTensorMode():
            value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # What torch raises for a damaged or a hostile file is of many types (UnpicklingError, RuntimeError,
        # EOFError, ValueError ...) and of many lines.
        text = str(error).strip().splitlines()
        reason = text[0][:200] if text else type(error).__name__
        raise CheckpointError(f"{path}: torch can't read it as weights only: {reason}") from error
    holder = next(
        (key for key in _HOLDERS if isinstance(value, dict) and isinstance(value.get(key), dict)), None
    )
    tensors = value if holder is None else value[holder]
    if not isinstance(tensors, dict):
        raise UnsupportedCheckpoint(f"{path}: holds {type(tensors).__name__}, expected tensors by name")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UnsupportedCheckpoint(
                f"{path}: {quoted(name)} is {type(tensor).__name__}, expected tensors by name"
            )
        if tensor.is_nested or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise UnsupportedCheckpoint(f"{path}: {quoted(name)} is nested, sparse or without data")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UnsupportedCheckpoint(f"{path}: {quoted(name)} has more elements than are stored")
    return dict(tensors)
