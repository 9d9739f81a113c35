"""Rows of a tensor whose sizes have changed: with zeros behind them, or without the zeros that were there.

Float rows are taken as they are. Rows of blocks stay blocks: zeros are blocks of the same type that decode to
exactly 0. So every weight keeps its value. What is taken away must be 0, and a row that has something else
there is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadRequest, BadWeights
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.tensors import TensorInfo
from quantize.fill.sources import FLOAT_DTYPES, MadeOfTensor, SourceTensor, rows_dtype, split_rows
from quantize.formats import get_decoder, get_format
from quantize.importances.weighting import ColumnWeights


@dataclass(frozen=True)
class Extent:
    """A size, as it is in the input and as it shall be."""

    old: int
    new: int

    @property
    def kept(self) -> int:
        return min(self.old, self.new)


@dataclass(frozen=True)
class Resize:
    """Change of a tensor's sizes and values.

    rows    size of each run of rows: a matrix, or each half of one that holds two; None: they stay
    cols    length of a row; None: it stays
    factor  of all that is kept
    """

    rows: Extent | None = None
    cols: Extent | None = None
    factor: float = 1.0

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Change a shape, rows first."""
        *outer, n_cols = shape
        if self.rows is not None:
            outer[-1] = outer[-1] // self.rows.old * self.rows.new
        return (*outer, n_cols if self.cols is None else self.cols.new)

    def joined(self, other: Resize) -> Resize:
        """This change and one of the other axis as one."""
        return Resize(self.rows or other.rows, self.cols or other.cols, self.factor * other.factor)

    def info(self, info: TensorInfo) -> TensorInfo:
        return TensorInfo(info.name, self.shape(info.shape), info.type)

    def refuse(self, info: TensorInfo, path: str) -> None:
        """Raise BadRequest for a tensor whose blocks can't be resized as they are stored."""
        type_ = info.type
        if type_ in FLOAT_DTYPES:
            return
        why = ""
        if self.factor != 1.0:
            why = "its values would have to be scaled"
        elif self.cols is not None and self.cols.kept % type_.block_elems:
            why = f"row {self.cols.kept} ends inside a block of {type_.block_elems}"
        elif type_.row_meta_bytes or type_.tensor_meta_bytes or type_.rows_interleaved > 1:
            why = "its rows are more than blocks behind each other"
        if why:
            raise BadRequest(
                f"{path}: {info.name} is {type_}, and {why}; change sizes in the F32, F16 or BF16 file"
            )


@dataclass(frozen=True)
class ResizedTensor(MadeOfTensor):
    """A tensor of the input with other sizes, unread."""

    tensor: SourceTensor
    resize: Resize

    @property
    def shape(self) -> tuple[int, ...]:
        return self.resize.shape(self.tensor.shape)

    @property
    def _n_cols(self) -> int:
        return self.shape[-1]

    @property
    def type(self) -> GGMLType:
        return self.tensor.type

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Read rows as `SourceTensor` does; raises BadWeights where something else than 0 would be lost."""
        rows = np.zeros((stop - start, self._n_cols), rows_dtype(self.type))
        for place, low, high in self._runs(start, stop):
            self._take(rows[place : place + high - low], self.tensor.read_rows(low, high), low)
        return rows

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        if self.type in FLOAT_DTYPES:
            return self.read_rows(start, stop).reshape(-1).view(np.uint8)
        n_blocks = self._n_cols // self.type.block_elems
        rows = np.tile(_zero_block(self.type), (stop - start) * n_blocks).reshape(stop - start, -1)
        for place, low, high in self._runs(start, stop):
            blocks = np.frombuffer(self.tensor.raw_rows(low, high), np.uint8).reshape(high - low, -1)
            kept = min(blocks.shape[1], rows.shape[1])
            if kept < blocks.shape[1]:
                self._refuse_values(self.tensor.read_rows(low, high)[:, self._n_cols :], low)
            rows[place : place + high - low, :kept] = blocks[:, :kept]
        return rows.reshape(-1)

    def _take(self, rows: npt.NDArray[Any], stored: npt.NDArray[Any], first: int) -> None:
        kept = min(rows.shape[1], stored.shape[1])
        self._refuse_values(stored[:, kept:], first)
        rows[:, :kept] = stored[:, :kept]
        if self.resize.factor != 1.0:
            rows[:, :kept] = rows[:, :kept].astype(np.float64) * self.resize.factor

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (place in the result, first, last + 1) of the stored rows that rows `start` to `stop` are."""
        n_rows = prod(self.tensor.shape[:-1])
        run = self.resize.rows or Extent(n_rows, n_rows)
        place = 0
        for number, low, high in split_rows(start, stop, run.new):
            base, last = number * run.old, min(high, run.old)
            if low < last:
                yield place, base + low, base + last
            if high == run.new < run.old:
                self._refuse_values(self.tensor.read_rows(base + run.new, base + run.old), base + run.new)
            place += high - low

    def _refuse_values(self, rows: npt.NDArray[Any], first: int) -> None:
        """Raise BadWeights where rows that would be lost, or ends of rows, are not 0."""
        found = np.argwhere(rows)
        if len(found):
            raise BadWeights(
                f"{self.name}: row {first + int(found[0, 0])} has values where the metadata say that there"
                " are zeros; the file was changed since it was padded: leave its sizes as they are"
            )


def _zero_block(type_: GGMLType) -> npt.NDArray[np.uint8]:
    """Encode a block of zeros, uint8 (block_bytes,); raises BadWeights for a type that can't say 0."""
    n_cols = type_.block_elems
    alike = ColumnWeights(np.ones(n_cols, np.float32))
    block = get_format(type_).encode(np.zeros((1, n_cols), np.float32), alike).reshape(1, -1).view(np.uint8)
    if get_decoder(type_)(block, n_cols).any():
        raise BadWeights(f"{type_} can't hold a zero")
    return block[0]


def resize_tensors(
    tensors: Mapping[str, SourceTensor], resized: Mapping[str, Resize]
) -> dict[str, SourceTensor]:
    """Give tensors their new sizes; the keys stay.

    resized  by the tensor's own name
    """
    return {
        name: ResizedTensor(tensor, resized[tensor.name]) if tensor.name in resized else tensor
        for name, tensor in tensors.items()
    }
