"""Where rows come from: one tensor of the input, unread.

A conversion's output tensors and a GGUF file's tensors look the same from here: rows, read a range at a time.
Rows of a stack of matrices are counted through all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gguf_tools.errors import QuantError
from gguf_tools.format.block_layouts import swap_bytes
from gguf_tools.format.ggml_types import BF16, F16, F32, GGMLType
from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.shards import open_gguf
from gguf_tools.format.tensors import TensorInfo
from quantize.formats import get_decoder

FLOAT_DTYPES: dict[GGMLType, np.dtype[Any]] = {
    F32: np.dtype(np.float32),
    F16: np.dtype(np.float16),
    BF16: np.dtype(ml_dtypes.bfloat16),
}
"""The types whose rows are read as they are stored."""


def rows_dtype(type_: GGMLType) -> np.dtype[Any]:
    """Return the type that rows of a source are read in: float32 where they have to be decoded."""
    return FLOAT_DTYPES.get(type_, FLOAT_DTYPES[F32])


class RowSource(Protocol):
    """Something that can be read by rows; reading is thread-safe.

    name     of the tensor or weight
    shape    rows first: (n_mats, n_rows, n_cols)
    type     how a row is stored, or the type that it can be had in
    by_rows  whether few rows at a time are read as fast as many
    """

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def type(self) -> GGMLType: ...

    @property
    def by_rows(self) -> bool: ...

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows start .. stop - 1, (stop - start, n_cols), of float32, float16 or bfloat16.

        Float storage comes in its own dtype, quantized storage decoded to float32. The array may be a
        view of the input; it is not to be written to.
        """
        ...


@runtime_checkable
class SourceTensor(RowSource, Protocol):
    """A tensor of the input, by its name in the output."""

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the same rows as the bytes of `type`, uint8 (n_bytes,)."""
        ...


class SourceSpec(Protocol):
    """How a process opens the sources of a job: paths and choices; picklable."""

    def open(self) -> AbstractContextManager[Mapping[str, SourceTensor]]:
        """Open them, by their names in the output."""
        ...


@dataclass(frozen=True)
class OpenSources:
    """Sources that this process has open. Another process that gets this value opens `spec` instead.

    tensors  by their names in the output
    spec     opens the same; None: the other process gets `tensors` themselves
    """

    tensors: Mapping[str, SourceTensor]
    spec: SourceSpec | None = None

    def open(self) -> AbstractContextManager[Mapping[str, SourceTensor]]:
        return nullcontext(self.tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        return (OpenSources, (self.tensors,)) if self.spec is None else (_itself, (self.spec,))


def _itself(spec: SourceSpec) -> SourceSpec:
    return spec


@dataclass(frozen=True)
class GGUFSources:
    """The tensors of a GGUF file, or of a split set.

    path   of the file, or of any part
    names  name in the output -> name in the file
    """

    path: Path
    names: Mapping[str, str]

    @contextmanager
    def open(self) -> Iterator[Mapping[str, SourceTensor]]:
        with open_gguf(self.path) as file:
            yield {name: GGUFTensor(file, stored) for name, stored in self.names.items()}


class GGUFTensor:
    """A tensor of an open GGUF file, or of a split set, as a SourceTensor."""

    by_rows = True

    def __init__(self, file: GGUFSource, name: str) -> None:
        self._file = file
        self._info: TensorInfo = file.tensor(name)

    @property
    def name(self) -> str:
        return self._info.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._info.shape

    @property
    def type(self) -> GGMLType:
        return self._info.type

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return rows start .. stop - 1 as stored, uint8 (n_bytes,), in little-endian order.

        They are read, not mapped: what a map has touched counts as this process's memory.
        raises   FormatError for a big-endian file of a type without a known big-endian form
        """
        raw = self._file.read_rows(self.name, start, stop)
        return swap_bytes(self.type, raw) if self._file.endian == "big" else raw

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows start .. stop - 1, (stop - start, n_cols), of float32, float16 or bfloat16.

        Of interleaved rows, whole groups are read.
        raises   QuantError for a storage type without a decoder, ShapeError for rows that fill no group
        """
        dtype = FLOAT_DTYPES.get(self.type)
        if dtype is not None:
            return self.raw_rows(start, stop).view(dtype).reshape(stop - start, self._info.n_cols)
        try:
            decode = get_decoder(self.type)
        except QuantError as error:
            raise QuantError(f"{self.name}: can't be decoded: {error}") from None
        group = self.type.rows_interleaved
        first, last = start // group * group, -(-stop // group) * group
        data = self.raw_rows(first, last).reshape(last - first, -1)
        return decode(data, self._info.n_cols)[start - first : stop - first]
