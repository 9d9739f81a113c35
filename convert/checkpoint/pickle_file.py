"""Pickle checkpoints (`.bin`, `.pt`), read by torch without running their code.

A pickle is a program, and loading one runs it. torch.load with weights_only=True instead runs a small
interpreter that builds tensors and containers and refuses everything else. That interpreter had holes, which
were closed one by one. So an old torch is refused, and pickles are read only when the user asks for it.

The file is a dictionary of tensors, or has one under "state_dict", "model" or "module". Tensors are mapped,
not read, so unused tensors cost nothing, except in files from before torch 1.6. Offsets count through the
tensors in the order of the file, as if they were stored one after the other.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zipfile import is_zipfile

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from gguf_tools.errors import CheckpointError, UnsupportedCheckpoint

OLDEST_TORCH = (2, 10)
_HOLDERS = ("state_dict", "model", "module")
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
    "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""Name in torch -> name in safetensors."""


class PickleFile:
    """An open pickle checkpoint: a convert.checkpoint.safetensors_file.TensorFile.

    raises   UnsupportedCheckpoint without a torch that is new enough, and for anything but tensors;
             CheckpointError for a file that torch can't read
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, str] = MappingProxyType({})
        self._tensors: list[Any] = []
        self._starts: list[int] = []
        tensors: dict[str, RawTensor] = {}
        position = 0
        for name, tensor in _load(path).items():
            dtype = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
            if dtype is None:
                raise UnsupportedCheckpoint(f"{path}: {name}: elements of type {tensor.dtype} can't be read")
            tensors[name] = RawTensor(name, dtype, tuple(tensor.shape), position, self)
            self._tensors.append(tensor)
            self._starts.append(position)
            position += tensor.numel() * tensor.element_size()
        self.tensors: Mapping[str, RawTensor] = MappingProxyType(tensors)

    def __enter__(self) -> PickleFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._tensors = []

    def read(self, offset: int, n_bytes: int, what: str) -> np.ndarray:
        """Return `n_bytes` bytes of the tensor that stands at `offset`, uint8, freshly allocated."""
        if not n_bytes:
            return np.empty(0, np.uint8)
        data, start = self._bytes_at(offset, what)
        return data[start : start + n_bytes].copy()

    def read_strided(self, offset: int, stride: int, out: np.ndarray, what: str) -> None:
        """Fill every row of `out`, uint8 (n_rows, n_bytes), from `offset` + row * `stride`, in one tensor."""
        if out.size:
            data, start = self._bytes_at(offset, what)
            out[:] = np.lib.stride_tricks.as_strided(data[start:], out.shape, (stride, 1))

    def _bytes_at(self, offset: int, what: str) -> tuple[np.ndarray, int]:
        """Return all bytes of the tensor that stands at `offset`, and where in it that is."""
        import torch

        if not self._tensors:
            raise CheckpointError(f"{self.path}: {what}: the file is closed")
        # An empty tensor starts where the next one does, and bisect finds the last of them.
        index = bisect_right(self._starts, offset) - 1
        data = self._tensors[index].detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return data, offset - self._starts[index]


def _load(path: Path) -> dict[str, Any]:
    """Return the tensors of the pickle at `path` by name."""
    try:
        import torch
    except ImportError:
        raise UnsupportedCheckpoint(
            f"{path}: reading a pickle needs torch: pip install 'gguf-tools[torch]', or '.[torch]' in a clone"
        ) from None
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if version < OLDEST_TORCH:
        raise UnsupportedCheckpoint(
            f"{path}: torch {torch.__version__} can be tricked into running a pickle's code, expected"
            f" {'.'.join(map(str, OLDEST_TORCH))} or newer"
        )
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
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
                f"{path}: {str(name)[:80]!r} is {type(tensor).__name__}, expected tensors by name"
            )
        if tensor.is_nested or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise UnsupportedCheckpoint(f"{path}: {name[:80]!r} is nested, sparse or without data")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UnsupportedCheckpoint(f"{path}: {name[:80]!r} has more elements than are stored")
    return dict(tensors)
