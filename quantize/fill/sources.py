"""Where rows come from: one tensor of the input, unread.

A conversion's output tensors and a GGUF file's tensors look the same from here: rows, read a range at a time.
Rows of a stack of matrices are counted through all of them.

Where the heads of a matrix lie one below the other, rows can be picked or transposed head by head and unread.
What is arranged may be a tensor of a GGUF file or a weight of a checkpoint: anything whose rows can be read.
A read takes what its rows need and no more; of a transposed matrix that is whole heads, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gguf_tools.errors import QuantError
from gguf_tools.format.block_layouts import swap_bytes
from gguf_tools.format.ggml_types import BF16, F16, F32, GGMLType
from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.shards import GGUFSet, open_gguf
from gguf_tools.format.tensors import TensorInfo
from quantize.formats import get_decoder

FLOAT_DTYPES: dict[GGMLType, np.dtype[Any]] = {
    F32: np.dtype(np.float32),
    F16: np.dtype(np.float16),
    BF16: np.dtype(ml_dtypes.bfloat16),
}
"""The types whose rows are read as they are stored."""


def rows_dtype(type_: GGMLType) -> np.dtype[Any]:
    """The type that rows of a source are read in: float32 where they have to be decoded."""
    return FLOAT_DTYPES.get(type_, FLOAT_DTYPES[F32])


class Described(Protocol):
    """Name, shape and type of a tensor."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def type(self) -> GGMLType: ...


class RowSource(Described, Protocol):
    """Something that can be read by rows; reading is thread-safe.

    name     of the tensor or weight
    shape    rows first: (n_mats, n_rows, n_cols)
    type     how a row is stored, or the type that it can be had in
    by_rows  whether few rows at a time are read as fast as many
    """

    @property
    def by_rows(self) -> bool: ...

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Read rows start .. stop - 1, (stop - start, n_cols), of float32, float16 or bfloat16.

        Float storage comes in its own dtype, quantized storage decoded to float32. The array may be a
        view of the input; it is not to be written to.
        """


@runtime_checkable
class SourceTensor(RowSource, Protocol):
    """A tensor of the input, by its name in the output."""

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Read the same rows as the bytes of `type`, uint8 (n_bytes,)."""


class SourceSpec(Protocol):
    """How a process opens the sources of a job: paths and choices; picklable."""

    def open(self) -> AbstractContextManager[Mapping[str, SourceTensor]]:
        """Open them, by their names in the output."""


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
    """Tensors that are made of those of a GGUF file, or of a split set.

    path  of the file, or of any part
    make  (open file) -> the tensors, by their names in the output; can be pickled
    """

    path: Path
    make: Callable[[GGUFSet], Mapping[str, SourceTensor]]

    @contextmanager
    def open(self) -> Iterator[Mapping[str, SourceTensor]]:
        with open_gguf(self.path) as file:
            yield self.make(file)


@dataclass(frozen=True)
class ChangedSources:
    """Sources of which some are changed once they are open.

    spec    opens them as they are
    change  (tensors by name) -> the same with those that change; can be pickled
    """

    spec: SourceSpec
    change: Callable[[Mapping[str, SourceTensor]], Mapping[str, SourceTensor]]

    @contextmanager
    def open(self) -> Iterator[Mapping[str, SourceTensor]]:
        with self.spec.open() as tensors:
            yield self.change(tensors)


class DescribedTensor:
    """Name, shape and type of a tensor, from its description.

    shape  a tensor without dimensions, which is one number, is a row of one
    """

    def __init__(self, info: TensorInfo) -> None:
        self._info = info

    @property
    def name(self) -> str:
        return self._info.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._info.shape or (1,)

    @property
    def type(self) -> GGMLType:
        return self._info.type


class MadeOfTensor:
    """Name and shape of a tensor that is made of another, row by row.

    tensor  the other
    """

    tensor: SourceTensor

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def by_rows(self) -> bool:
        return self.tensor.by_rows


class GGUFTensor(DescribedTensor):
    """A tensor of an open GGUF file, or of a split set, as a SourceTensor."""

    by_rows = True

    def __init__(self, file: GGUFSource, name: str) -> None:
        super().__init__(file.tensor(name))
        self._file = file

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Read rows start .. stop - 1 as stored, uint8 (n_bytes,), in little-endian order.

        They are read, not mapped: what a map has touched counts as this process's memory.
        raises   FormatError for a big-endian file of a type without a known big-endian form
        """
        raw = self._file.read_rows(self.name, start, stop)
        return swap_bytes(self.type, raw) if self._file.endian == "big" else raw

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Read rows start .. stop - 1, (stop - start, n_cols), of float32, float16 or bfloat16.

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


def stored_tensors(file: GGUFSource, names: Mapping[str, str]) -> dict[str, SourceTensor]:
    """Take tensors of an open file as they are stored.

    names  name in the output -> name in the file
    """
    return {name: GGUFTensor(file, stored) for name, stored in names.items()}


Source = TypeVar("Source", bound=RowSource)


@dataclass(frozen=True)
class HeadRun(Generic[Source]):
    """A run of rows out of every head of a tensor.

    shape      of what is made of the runs
    tensor     of n_heads * head_rows rows
    head_rows  rows of one head in `tensor`
    first      where in a head the run begins
    count      how many rows it has
    """

    name: str
    shape: tuple[int, ...]
    tensor: Source
    head_rows: int
    first: int
    count: int

    @property
    def stored_as(self) -> str:
        """How a checkpoint holds the tensor, for people; "" for a GGUF file's."""
        return getattr(self.tensor, "stored_as", "")


class HeadRows(HeadRun[Source]):
    """The runs of all heads, as they are stored: n_heads * count rows."""

    @property
    def type(self) -> GGMLType:
        return self.tensor.type

    @property
    def by_rows(self) -> bool:
        return self.tensor.by_rows

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        dtype = rows_dtype(self.type)
        runs = (self.tensor.read_rows(low, high) for low, high in self._runs(start, stop))
        return joined([rows.astype(dtype, copy=False) for rows in runs], (self.shape[-1],), dtype)

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        parts = [raw_rows(self.tensor, low, high) for low, high in self._runs(start, stop)]
        return joined(parts, (), np.dtype(np.uint8))

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the rows of the tensor that rows `start` to `stop` are."""
        for head, low, high in split_rows(start, stop, self.count):
            base = head * self.head_rows + self.first
            yield base + low, base + high


class TransposedHeads(HeadRun[Source]):
    """The runs of all heads, transposed: (n_heads * n_cols, count), as floats.

    A row of the result is a column of the tensor: for any row, the run of its whole head is read.
    """

    @property
    def type(self) -> GGMLType:
        return float_type(self.tensor)

    @property
    def by_rows(self) -> bool:
        return False

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        n_cols = self.tensor.shape[-1]
        rows = np.empty((stop - start, self.count), FLOAT_DTYPES[self.type])
        filled = 0
        for head, low, high in split_rows(start, stop, n_cols):
            base = head * self.head_rows + self.first
            run = self.tensor.read_rows(base, base + self.count)
            rows[filled : filled + high - low] = run.T[low:high]
            filled += high - low
        return rows

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return self.read_rows(start, stop).reshape(-1).view(np.uint8)


def split_rows(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index, low, high) for every head, or matrix, of `size` rows that rows `start` to `stop` touch.

    >>> list(split_rows(3, 9, 4))
    [(0, 3, 4), (1, 0, 4), (2, 0, 1)]
    """
    while start < stop:
        index, low = divmod(start, size)
        high = min(size, low + stop - start)
        yield index, low, high
        start += high - low


def consecutive_runs(numbers: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) for every run of consecutive numbers, in their order.

    >>> list(consecutive_runs(np.array([3, 4, 7])))
    [(3, 5), (7, 8)]
    """
    if len(numbers):
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
            yield int(run[0]), int(run[-1]) + 1


def joined(parts: Sequence[npt.NDArray[Any]], row: tuple[int, ...], dtype: np.dtype) -> npt.NDArray[Any]:
    """Put `parts`, whose rows have the shape `row`, below each other; a contiguous single one as it is."""
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0])
    out = np.empty((sum(map(len, parts)), *row), dtype)
    return np.concatenate(parts, out=out) if parts else out


def raw_rows(tensor: RowSource, start: int, stop: int) -> npt.NDArray[np.uint8]:
    """Read rows as the bytes of the tensor's type, uint8."""
    if tensor.type in FLOAT_DTYPES:
        rows = tensor.read_rows(start, stop).astype(FLOAT_DTYPES[tensor.type], copy=False)
        return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    assert isinstance(tensor, SourceTensor), f"{tensor.name}: {tensor.type.name}, but no blocks"
    return tensor.raw_rows(start, stop)


def float_type(tensor: RowSource) -> GGMLType:
    """The type of a tensor's rows as they are read: its own, or F32 for a quantized one."""
    return tensor.type if tensor.type in FLOAT_DTYPES else F32
