"""The rounders of the grid types: scales as llama.cpp's search gives them, then better ones under feedback.

A block's d is first that of the stock encoder, then the one that would fit best what has come of it, then
some around that. Of all these each row keeps the cheapest.

A type's layout says where it keeps indices, signs and scales: blocks as arrays, and back. Each type's module
under quantize.formats.iq has the layout of its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, GGMLType
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, as_source, block_dtype
from quantize.formats.iq import grids
from quantize.formats.iq.grids import Grid
from quantize.formats.iq.iq2 import IQ2_XXS_BLOCK
from quantize.formats.iq.iq2_search import with_even_signs
from quantize.importances.weighting import ColumnWeights
from quantize.rounding.base import Effort
from quantize.rounding.factor import Panel
from quantize.rounding.grids import kernels
from quantize.rounding.grids.eight_weights import Lattice
from quantize.rounding.grids.kernels import ELEMS, Form, GridGround, GridState, Kernels, RowChoices, Terms
from quantize.rounding.grids.tree_search import tree
from quantize.rounding.scalar.blocks import as_half, halves
from quantize.simd.floats import halves_to_float32
from quantize.simd.lanes import LANES
from quantize.simd.packing import packed, unpack

Array = npt.NDArray[Any]

Block = np.dtype[Any]

Path = tuple[str, ...]
"""Names of fields, each in the one before it."""


@dataclass(frozen=True, eq=False)
class GridBlocks:
    """n blocks of 256 weights.

    d        float32 (n,), float16 numbers: the scale of the scales
    scales   int64 (n, 8 or 16), integer scales of sub-blocks
    indices  int64 (n, 32 or 64), of the grid points of groups of 8 or 4
    signs    uint8 (n, 32): bit i of byte k is set where weight 8 * k + i is negative; of IQ1 0xFF where the
             shift of group k is -1/8, and else 0
    """

    d: Floats32
    scales: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    signs: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GridLayout:
    """The two directions of a type.

    read   uint8 (n, bytes of a block) to blocks
    write  the inverse
    """

    type: GGMLType
    read: Callable[[Bytes], GridBlocks]
    write: Callable[[GridBlocks], Bytes]


def _blocks(data: Bytes, block: Block) -> Array:
    return np.ascontiguousarray(data).view(block)[:, 0]


def _at(blocks: Array, path: Path) -> Array:
    """Show a field of blocks, to read or to write."""
    for name in path:
        blocks = blocks[name]
    return blocks


def _bytes(blocks: Array) -> Bytes:
    return blocks.view(np.uint8).reshape(len(blocks), -1)


def _fields(d: Array, scales: Array, indices: Array, signs: Array) -> GridBlocks:
    n = len(d)
    return GridBlocks(
        halves_to_float32(d.astype(np.uint16)),
        scales.reshape(n, -1).astype(np.int64),
        indices.reshape(n, -1).astype(np.int64),
        signs.reshape(n, -1).astype(np.uint8),
    )


def _bits(values: Array, width: int, count: int) -> Array:
    """Take `count` numbers of `width` bits out of each value, the lowest first: one more axis."""
    return values[..., None].astype(np.int64) >> width * np.arange(count) & (1 << width) - 1


def _to_bits(numbers: Array, width: int) -> Array:
    """Put the numbers of the last axis side by side in one, the first one lowest: int64."""
    return (numbers.astype(np.int64) << width * np.arange(numbers.shape[-1])).sum(axis=-1)


# ---- IQ2 and IQ3


def _with_packed_signs(type_: GGMLType, block: Block, indices: Path, words: Path) -> GridLayout:
    """The layout of IQ2_XXS and IQ3_XXS: 32 bits for 32 weights, seven signs of each eight and the scale.

    indices  where the indices are in a block
    words    where the 32 bits are
    """

    def read(data: Bytes) -> GridBlocks:
        blocks = _blocks(data, block)
        bits = _at(blocks, words)
        return _fields(blocks["d"], bits >> 28, _at(blocks, indices), with_even_signs(_bits(bits, 7, 4)))

    def write(parts: GridBlocks) -> Bytes:
        blocks = np.empty(len(parts.d), block)
        blocks["d"] = halves(parts.d)
        to = _at(blocks, indices)
        to[...] = parts.indices.reshape(to.shape)
        _at(blocks, words)[...] = _to_bits(parts.signs.reshape(-1, 8, 4) & 127, 7) | parts.scales << 28
        return _bytes(blocks)

    return GridLayout(type_, read, write)


def _with_whole_signs(type_: GGMLType, block: Block, width: int) -> GridLayout:
    """The layout of IQ2_S and IQ3_S: eight signs of each eight weights, and `width` high bits of an index."""
    count = 8 // width

    def read(data: Bytes) -> GridBlocks:
        blocks = _blocks(data, block)
        high = _bits(blocks["qh"], width, count).reshape(blocks["qs"].shape)
        return _fields(blocks["d"], unpack(blocks["scales"], 4, 1), blocks["qs"] | high << 8, blocks["signs"])

    def write(parts: GridBlocks) -> Bytes:
        blocks = np.empty(len(parts.d), block)
        blocks["d"] = halves(parts.d)
        blocks["qs"] = parts.indices & 255
        blocks["qh"] = _to_bits(parts.indices.reshape(-1, 8, count) >> 8, width)
        blocks["signs"] = parts.signs
        blocks["scales"] = packed(parts.scales, 4, 1)
        return _bytes(blocks)

    return GridLayout(type_, read, write)


def _read_iq2_xs(data: Bytes) -> GridBlocks:
    blocks = _blocks(data, block_dtype(IQ2_XS))
    signs = with_even_signs(blocks["qs"] >> 9)
    return _fields(blocks["d"], unpack(blocks["scales"], 4, 1), blocks["qs"] & 511, signs)


def _write_iq2_xs(parts: GridBlocks) -> Bytes:
    blocks = np.empty(len(parts.d), block_dtype(IQ2_XS))
    blocks["d"] = halves(parts.d)
    blocks["qs"] = parts.indices | (parts.signs & 127).astype(np.int64) << 9
    blocks["scales"] = packed(parts.scales, 4, 1)
    return _bytes(blocks)


# ---- IQ1


def _read_iq1_s(data: Bytes) -> GridBlocks:
    blocks = _blocks(data, block_dtype(IQ1_S))
    indices = blocks["qs"] | _bits(blocks["qh"], 3, 4).reshape(-1, 32) << 8
    shifts = np.repeat(blocks["qh"] >> 15, 4, axis=1) * 255
    return _fields(blocks["d"], blocks["qh"] >> 12 & 7, indices, shifts)


def _write_iq1_s(parts: GridBlocks) -> Bytes:
    blocks = np.empty(len(parts.d), block_dtype(IQ1_S))
    blocks["d"] = halves(parts.d)
    blocks["qs"] = parts.indices & 255
    shifts = parts.signs[:, ::4].astype(np.int64) & 1
    blocks["qh"] = _to_bits(parts.indices.reshape(-1, 8, 4) >> 8, 3) | parts.scales << 12 | shifts << 15
    return _bytes(blocks)


def _read_iq1_m(data: Bytes) -> GridBlocks:
    blocks = _blocks(data, block_dtype(IQ1_M))
    high = unpack(blocks["qh"], 4, 1)
    indices = blocks["qs"] | (high & 7).astype(np.int64) << 8
    d = _to_bits(blocks["scales"] >> 12, 4)
    return _fields(d, _bits(blocks["scales"], 3, 4), indices, (high >> 3) * 255)


def _write_iq1_m(parts: GridBlocks) -> Bytes:
    n = len(parts.d)
    blocks = np.empty(n, block_dtype(IQ1_M))
    blocks["qs"] = parts.indices & 255
    blocks["qh"] = packed(parts.indices >> 8 | (parts.signs & 1).astype(np.int64) << 3, 4, 1)
    blocks["scales"] = _to_bits(parts.scales.reshape(n, 4, 4), 3) | _bits(halves(parts.d), 4, 4) << 12
    return _bytes(blocks)


LAYOUTS = {
    layout.type.name: layout
    for layout in (
        _with_packed_signs(IQ2_XXS, IQ2_XXS_BLOCK, ("qs", "indices"), ("qs", "signs_scale")),
        GridLayout(IQ2_XS, _read_iq2_xs, _write_iq2_xs),
        _with_whole_signs(IQ2_S, block_dtype(IQ2_S), 2),
        _with_packed_signs(IQ3_XXS, block_dtype(IQ3_XXS), ("qs",), ("words",)),
        _with_whole_signs(IQ3_S, block_dtype(IQ3_S), 1),
        GridLayout(IQ1_S, _read_iq1_s, _write_iq1_s),
        GridLayout(IQ1_M, _read_iq1_m, _write_iq1_m),
    )
}
"""The layouts by the name of the type."""


_AROUND = (1.0, 0.95, 1.05, 0.9, 1.1)
"""The factors of the best fitting d whose products are tried, in this order."""


@dataclass(frozen=True, eq=False)
class GridRounder:
    """The rounder of a type."""

    layout: GridLayout
    grid: Grid
    form: Form
    kernels: Kernels

    @property
    def type(self) -> GGMLType:
        return self.layout.type

    def round_block(self, rows: Floats32, panel: Panel, effort: Effort) -> tuple[Bytes, Floats32]:
        """Round one block of each row to bytes, and decode them; see base.Rounder."""
        codec = get_format(self.type)
        start = self.layout.read(codec.encode(rows, ColumnWeights(panel.importances)))
        best = self.attempt(rows, panel.upper, effort.grid_window, start.d, start.scales)
        fitted = as_half(np.where(best.factors > 0, best.d * best.factors, best.d))
        for factor in _AROUND[: effort.super_scales - 1]:
            d = as_half(fitted * np.float32(factor))
            scales = self._scales_for(best, d)
            best = _cheaper(best, self.attempt(rows, panel.upper, effort.grid_window, d, scales))
        data = self.layout.write(self.blocks(best.d, best.scales, best.codes, best.signs))
        return data, codec.decode(data, rows.shape[1])

    def attempt(
        self, rows: Floats32, upper: Floats32, window: int, d: Floats32, scales: npt.NDArray[np.integer]
    ) -> RowChoices:
        """Round blocks with these d, float32 (n_rows,), and scales up to `window` from those given.

        returns  an array with one item, or one row of items, per row
        """
        n_rows, n_codes = len(rows), 32 * self.form.codes
        padded = n_rows + -n_rows % LANES
        choices = RowChoices(
            d=_padded(d),
            scales=_padded(scales.T.astype(np.int32)).reshape(-1),
            codes=np.empty(n_codes * padded, np.int32),
            signs=np.empty(32 * padded, np.int32),
            costs=np.empty(padded, np.float32),
            factors=np.empty(padded, np.float32),
        )
        diagonal = np.diag(upper)
        self.kernels.round(self._terms(upper / diagonal, diagonal, window), as_source(rows), choices)
        return RowChoices(
            choices.d[:n_rows],
            _by_row(choices.scales, n_rows),
            _by_row(choices.codes, n_rows),
            _by_row(choices.signs, n_rows),
            choices.costs[:n_rows],
            choices.factors[:n_rows],
        )

    def refine_block(
        self, data: Bytes, pulls: Floats32, panel: Panel, effort: Effort
    ) -> tuple[Bytes, Floats32]:
        """Find better bytes, and how far the values move; see base.Refiner."""
        n_rows, size = len(data), self.form.sub_elems
        start = self.layout.read(data)
        decode = get_format(self.type).decode
        values = decode(data, ELEMS)
        state = GridState(
            pulls=as_source(pulls),
            values=as_source(values),
            d=_padded(start.d),
            scales=_padded(start.scales.T.astype(np.int32)).reshape(-1),
            codes=_padded(self.grid.codes[start.indices].T).reshape(-1),
            signs=_padded(start.signs.T.astype(np.int32)).reshape(-1),
        )
        ratios, diagonal = _local_ratios(panel.local_uppers(size), size)
        ground = GridGround(as_source(panel.hessian), diagonal)
        self.kernels.refine(self._terms(ratios, diagonal, effort.grid_window), ground, state)
        scales, codes, signs = (_by_row(parts, n_rows) for parts in (state.scales, state.codes, state.signs))
        better = self.layout.write(self.blocks(state.d[:n_rows], scales, codes, signs))
        return better, decode(better, ELEMS) - values

    def _terms(self, ratios: Floats32, diagonal: Floats32, window: int) -> Terms:
        """Gather what all sub-blocks share.

        ratios    float32 (256, 256), U[i, j] / U[j, j] of the factor that they are rounded under
        diagonal  float32 (256,), U[i, i]
        """
        lattice = Lattice(tree(self.grid), self._values, ratios.reshape(-1))
        return Terms(self.form, lattice, np.float32(1) / diagonal, window)

    def _scales_for(self, attempt: RowChoices, d: Floats32) -> npt.NDArray[np.int32]:
        """Compute the scales, int32 (n_rows, sub-blocks), that with other d come nearest to an attempt's."""
        offset, slope, top = self.form.offset, self.form.slope, self.form.top
        ratio = np.divide(attempt.d, d, out=np.ones_like(d), where=d > 0)
        wanted = ((offset + slope * attempt.scales) * ratio[:, None] - offset) / slope
        return np.clip(np.rint(wanted), 0, top).astype(np.int32)

    def blocks(
        self,
        d: Floats32,
        scales: npt.NDArray[np.int32],
        codes: npt.NDArray[np.int32],
        signs: npt.NDArray[np.int32],
    ) -> GridBlocks:
        """Give layouts what kernels have chosen, by row."""
        return GridBlocks(d, scales.astype(np.int64), self._index_of_code[codes], signs.astype(np.uint8))

    @cached_property
    def _values(self) -> Floats32:
        """Values of the levels, by the bits of a code: float32 (16,)."""
        values = np.zeros((16 >> self.grid.code_bits, 1 << self.grid.code_bits), np.float32)
        values[:, : self.grid.base] = self.grid.values
        return values.reshape(-1)

    @cached_property
    def _index_of_code(self) -> npt.NDArray[np.int64]:
        indices = np.zeros(int(self.grid.codes.max()) + 1, np.int64)
        indices[self.grid.codes] = np.arange(len(self.grid.codes))
        return indices


def _cheaper(one: RowChoices, other: RowChoices) -> RowChoices:
    """Take the cheaper of two attempts, row by row."""
    better = other.costs < one.costs

    def pick(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.where(better[:, None] if ours.ndim > 1 else better, theirs, ours)

    return RowChoices(*(pick(ours, theirs) for ours, theirs in zip(one, other, strict=True)))


def _local_ratios(uppers: Floats32, size: int) -> tuple[Floats32, Floats32]:
    """Arrange the factors of sub-blocks by themselves as those of a block, with nothing between sub-blocks.

    uppers   float32 (256, size)
    returns  U[i, j] / U[j, j], float32 (256, 256), and U[i, i], float32 (256,)
    """
    places = np.arange(ELEMS)
    diagonal = uppers[places, places % size]
    columns = (places // size * size)[:, None] + np.arange(size)
    ratios = np.zeros((ELEMS, ELEMS), np.float32)
    ratios[places[:, None], columns] = uppers / diagonal[columns]
    return ratios, diagonal


def _padded(parts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Fill the last axis of an array, rows, up to a multiple of LANES by repeating the last."""
    fill = [(0, 0)] * (parts.ndim - 1) + [(0, -parts.shape[-1] % LANES)]
    return np.pad(parts, fill, "edge")


def _by_row(parts: npt.NDArray[Any], n_rows: int) -> npt.NDArray[Any]:
    """Turn what a kernel made, (items * padded rows,), into (n_rows, items)."""
    return parts.reshape(-1, n_rows + -n_rows % LANES).T[:n_rows]


def _form(sub_elems: int, codes: int, variants: int, offset: float, slope: float, top: int) -> Form:
    return Form(sub_elems, codes, variants, np.float32(offset), np.float32(slope), top)


GRID_ROUNDERS: Sequence[GridRounder] = (
    GridRounder(LAYOUTS["IQ1_S"], grids.IQ1, _form(32, 1, 2, 1, 2, 7), kernels.SHIFTED_EIGHTS),
    GridRounder(LAYOUTS["IQ1_M"], grids.IQ1, _form(16, 1, 1, 1, 2, 7), kernels.EIGHTS_BY_SHIFT),
    GridRounder(LAYOUTS["IQ2_XXS"], grids.IQ2_XXS, _form(32, 1, 1, 0.125, 0.25, 15), kernels.EVEN_EIGHTS),
    GridRounder(LAYOUTS["IQ2_XS"], grids.IQ2_XS, _form(16, 1, 1, 0.125, 0.25, 15), kernels.EVEN_EIGHTS),
    GridRounder(LAYOUTS["IQ2_S"], grids.IQ2_S, _form(16, 1, 1, 0.125, 0.25, 15), kernels.EIGHTS),
    GridRounder(LAYOUTS["IQ3_XXS"], grids.IQ3_XXS, _form(32, 2, 1, 0.25, 0.5, 15), kernels.EVEN_FOURS),
    GridRounder(LAYOUTS["IQ3_S"], grids.IQ3_S, _form(32, 2, 1, 1, 2, 15), kernels.FOURS),
)
