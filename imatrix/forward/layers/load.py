"""Weights as torch tensors. Bfloat16 is taken as it is stored; all else is decoded in runs of rows.

Only the tensor and one run of rows are in memory at a time.

Models that go through a text in step share decoded weights. Files of one base often agree in some tensors:
these have the same type, and were made with the same importances. The models of an evaluation read a layer
one after the other. So what one has decoded is kept until the last of them that could want it has asked.
Whether it fits is decided by the bytes alone, which every model reads for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

from gguf_tools.errors import FormatError, MissingTensor, ShapeError
from gguf_tools.format.ggml_types import BF16, F16, F32, I32
from imatrix.forward.device import to_torch
from imatrix.forward.layers.llama_rounding import Rounding, RoundingMatrix, rounding_if_quantized, rounding_of
from quantize.fill.scaled import ScaledTensor
from quantize.fill.sources import FLOAT_DTYPES, SourceTensor, consecutive_runs
from quantize.roles import float32_reason

KEPT_BYTES = 512 << 20
"""Budget for what is kept: a layer of a model with billions of weights, of a larger one a part."""

_Part = tuple[str, int, int, torch.dtype]
"""Name of a tensor, its first row and the one behind the last, and what they are decoded to."""


@dataclass(frozen=True)
class _Kept:
    """Rows that were decoded.

    raw     their bytes
    n_left  models that may still ask for them
    """

    raw: npt.NDArray[np.uint8]
    rows: torch.Tensor
    n_left: int

    @property
    def n_bytes(self) -> int:
        return self.raw.nbytes + self.rows.nbytes


class SharedWeights:
    """Weights that some models have decoded for each other.

    models     the tensors of each, by name
    max_bytes  of what is kept; beyond it, rows are decoded again
    """

    def __init__(self, models: Iterable[Mapping[str, SourceTensor]], max_bytes: int = KEPT_BYTES) -> None:
        self._n_models = Counter(_kind(tensor) for tensors in models for tensor in tensors.values())
        self._max_bytes = max_bytes
        self._kept: dict[_Part, _Kept] = {}
        self._lock = Lock()

    @property
    def n_bytes(self) -> int:
        """Size of what is kept."""
        return sum(kept.n_bytes for kept in self._kept.values())

    def rows(
        self,
        tensor: SourceTensor,
        start: int,
        stop: int,
        dtype: torch.dtype,
        decode: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Return rows `start` to `stop` of a model's tensor, which nobody may change.

        decode  returns them, for rows that no other model has decoded
        """
        n_models = self._n_models[_kind(tensor)]
        is_scaled = isinstance(tensor, ScaledTensor)  # its bytes don't tell by what
        if n_models < 2 or is_scaled or tensor.type in FLOAT_DTYPES or tensor.type.rows_interleaved > 1:
            return decode()
        part, raw = (tensor.name, start, stop, dtype), tensor.raw_rows(start, stop)
        with self._lock:
            kept = self._kept.pop(part, None)
        is_same = kept is not None and np.array_equal(kept.raw, raw)
        rows = kept.rows if kept is not None and is_same else decode()
        fresh = _Kept(raw, rows, (n_models if kept is None else kept.n_left) - 1)
        with self._lock:
            if fresh.n_left and self.n_bytes + fresh.n_bytes <= self._max_bytes:
                self._kept[part] = fresh
        return rows

    def forget(self) -> None:
        """Keep nothing: all models have had the layer."""
        with self._lock:
            self._kept.clear()


def _kind(tensor: SourceTensor) -> tuple[str, str, tuple[int, ...]]:
    """Name, type and shape, which are alike for tensors that may be the same bytes."""
    return tensor.name, tensor.type.name, tensor.shape


_RUN_BYTES = 32 << 20


@dataclass(frozen=True)
class Loader:
    """Reads the weights of one model.

    path        of the model, for messages
    tensors     GGUF name -> tensor, unread
    device      where the weights are wanted
    dtype       the type that matrices are multiplied in, float32 or bfloat16; vectors and routers are float32
    llama_rounding  whether matrices round what they multiply as llama.cpp's kernels do
    half_cache  whether attention rounds to F16 what llama.cpp's cache holds
    as_bf16     whether weights are rounded to BF16 that the converter stores as BF16
    as_quantized    whether float matrices round what they multiply as quantized ones do, with llama_rounding
    splits_kv_b     whether attn_kv_b stands for the attn_k_b and attn_v_b that a converter makes of it
    shared      what models that are computed in step decode for each other; None: nothing
    """

    path: Path
    tensors: Mapping[str, SourceTensor]
    device: torch.device
    dtype: torch.dtype
    llama_rounding: bool = False
    half_cache: bool = False
    as_bf16: bool = False
    as_quantized: bool = False
    splits_kv_b: bool = False
    shared: SharedWeights | None = None

    @property
    def is_rounded(self) -> bool:
        """Whether the model is computed as another file of it would be, see ForwardOptions.rounded."""
        return self.as_bf16 or self.as_quantized

    def tensor(self, name: str) -> SourceTensor:
        """Return the tensor called `name`; MissingTensor if there is none."""
        try:
            return self.tensors[name]
        except KeyError:
            raise MissingTensor(f"{self.path}: no tensor {name}") from None

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shaped(self, name: str, *shape: int) -> SourceTensor:
        """Return the tensor `name`, which must have as many elements, and columns, as `shape`.

        raises  MissingTensor, ShapeError
        """
        tensor = self.tensor(name)
        if prod(tensor.shape) != prod(shape) or tensor.shape[-1] != shape[-1]:
            raise ShapeError(
                f"{self.path}: {name}: found shape {_shown(tensor.shape)}, expected {_shown(shape)}"
            )
        return tensor

    def matrix(self, name: str, *shape: int) -> torch.Tensor:
        """Return the whole tensor `name` in `shape`; see `shaped`."""
        tensor = self.shaped(name, *shape)
        return self.weight(tensor, 0, prod(shape[:-1])).view(shape)

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        """Return the tensor `name` in float32, whatever type matrices are multiplied in."""
        return replace(self, dtype=torch.float32).matrix(name, *shape)

    def bias(self, name: str, *shape: int) -> torch.Tensor | None:
        """Return the bias beside the matrix `name`, in the dtype of matrices; None where there is none."""
        bias = f"{name.removesuffix('.weight')}.bias"
        return self.matrix(bias, *shape) if self.has(bias) else None

    def table(self, name: str, n_cols: int, limit: int) -> torch.Tensor:
        """Return a table of whole numbers from 0 to below `limit`, int64 (n_rows, n_cols).

        raises  MissingTensor, ShapeError; FormatError for another type or other numbers
        """
        tensor = self.tensor(name)
        if len(tensor.shape) != 2 or tensor.shape[1] != n_cols:
            raise ShapeError(
                f"{self.path}: {name}: found shape {_shown(tensor.shape)}, expected N x {n_cols}"
            )
        if tensor.type != I32:
            raise FormatError(f"{self.path}: {name}: found type {tensor.type}, expected {I32}")
        numbers = self.numbers(tensor)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < limit:
            raise FormatError(
                f"{self.path}: {name}: has numbers from {numbers.min()} to {numbers.max()},"
                f" expected 0 to {limit - 1}"
            )
        return to_torch(numbers.astype(np.int64), self.device)

    def numbers(self, tensor: SourceTensor) -> npt.NDArray[np.int32]:
        """Return a tensor of whole numbers as it is stored."""
        return tensor.raw_rows(0, tensor.shape[0]).view("<i4").reshape(tensor.shape)

    def leave(self, *names: str) -> None:
        """Name tensors that a model may have though nothing uses them, for those who ask what is used."""

    def stacked(self, name: str, index: int, n_mats: int, n_rows: int, n_cols: int) -> torch.Tensor:
        """Return one matrix, (n_rows, n_cols), of a stack of n_mats."""
        tensor = self.tensor(name)
        if tensor.shape != (n_mats, n_rows, n_cols):
            raise ShapeError(
                f"{self.path}: {name}: found shape {_shown(tensor.shape)},"
                f" expected {_shown((n_mats, n_rows, n_cols))}"
            )
        return self.weight(tensor, index * n_rows, (index + 1) * n_rows)

    def weight(self, tensor: SourceTensor, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop` of a matrix in the type that it is multiplied in."""
        rows = self._shared_rows(tensor, start, stop)
        rounding = self.rounding(tensor)
        return rows if rounding is None or len(tensor.shape) < 2 else RoundingMatrix.of(rows, rounding)

    def _shared_rows(self, tensor: SourceTensor, start: int, stop: int) -> torch.Tensor:
        def decode() -> torch.Tensor:
            return self.rows(tensor, start, stop, self.dtype)

        return decode() if self.shared is None else self.shared.rows(tensor, start, stop, self.dtype, decode)

    def rounding(self, tensor: SourceTensor, n_cols: int | None = None) -> Rounding | None:
        """Find how a matrix rounds what it multiplies; None: not at all.

        n_cols  of what it multiplies; None: those of the tensor, which may hold the matrix transposed
        """
        if not self.llama_rounding:
            return None
        if self.as_quantized and tensor.type in FLOAT_DTYPES:
            return rounding_if_quantized(tensor, n_cols or tensor.shape[-1])
        return rounding_of(BF16 if self.loses_bits(tensor) else tensor.type)

    def rows(self, tensor: SourceTensor, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows `start` to `stop` of a tensor, (stop - start, n_cols)."""
        if tensor.type == BF16 and dtype == torch.bfloat16:
            return to_torch(tensor.read_rows(start, stop), self.device).to(dtype)
        n_cols = tensor.shape[-1]
        step = max(1, _RUN_BYTES // (4 * n_cols))
        out = torch.empty((stop - start, n_cols), dtype=dtype, device=self.device)
        for at in range(start, stop, step):
            end = min(stop, at + step)
            rows = to_torch(tensor.read_rows(at, end))
            out[at - start : end - start] = rows.bfloat16() if self.loses_bits(tensor) else rows
        return out

    def loses_bits(self, tensor: SourceTensor) -> bool:
        """Tell whether a tensor is rounded to BF16."""
        return self.as_bf16 and tensor.type in (F32, F16) and not float32_reason(tensor.name, tensor.shape)

    def picked_rows(self, name: str, wanted: Iterable[int]) -> torch.Tensor:
        """Return the rows with these sorted numbers, float32; neighbours are read together."""
        tensor = self.tensor(name)
        numbers = np.fromiter(wanted, np.int64)
        return torch.cat([self.rows(tensor, *run, torch.float32) for run in consecutive_runs(numbers)])


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
