"""The rounders of the grid types: scales as llama.cpp's search gives them, then better ones under feedback.

A block's d is first that of the stock encoder, then the one that would fit best what has come of it, then
some around that. Of all these each row keeps the cheapest.

A type's layout says where it keeps indices, signs and scales: blocks as arrays, and back. Each type's module
under quantize.formats.iq has the layout of its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, GGMLType
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, as_source, block_dtype
from quantize.formats.bits import numbers_of
from quantize.formats.iq import grids
from quantize.formats.iq.grids import Grid
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

    Of the signs of eight weights a type stores all, seven, from which the eighth follows, or none: IQ1 has a
    shift there, for eight weights or for 32.
    """

    type: GGMLType

    def read(self, data: Bytes) -> GridBlocks:
        """Take blocks, uint8 (n, bytes of a block), apart."""
        numbers = numbers_of(self.type)
        stored = {name: each.read(data) for name, each in numbers.items()}
        signs = stored["signs"]
        if numbers["signs"].highest == 127:
            signs = with_even_signs(signs)
        elif numbers["signs"].highest == 1:
            signs = np.repeat(signs * np.uint8(255), 32 // signs.shape[1], axis=1)
        if "d" in stored:
            d = (stored["d"].astype(np.uint16) << 4 * np.arange(4, dtype=np.uint16)).sum(1, dtype=np.uint16)
        else:
            d = np.ascontiguousarray(data).view(block_dtype(self.type))["d"][:, 0]
        scales, indices = stored["scales"].astype(np.int64), stored["codes"].astype(np.int64)
        return GridBlocks(halves_to_float32(d), scales, indices, signs)

    def write(self, parts: GridBlocks) -> Bytes:
        """Pack blocks: the inverse of `read`."""
        numbers = numbers_of(self.type)
        blocks = np.zeros(len(parts.d), block_dtype(self.type))
        data = blocks.view(np.uint8).reshape(len(blocks), -1)
        d = halves(parts.d)
        if "d" in numbers:
            numbers["d"].write(data, d[:, None] >> 4 * np.arange(4, dtype=np.uint16))
        else:
            blocks["d"] = d
        signs = parts.signs
        if numbers["signs"].highest == 1:
            signs = signs[:, :: 32 // len(numbers["signs"].positions)]
        numbers["signs"].write(data, signs)
        numbers["scales"].write(data, parts.scales)
        numbers["codes"].write(data, parts.indices)
        return data


LAYOUTS = {type_.name: GridLayout(type_) for type_ in (IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M)}
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
