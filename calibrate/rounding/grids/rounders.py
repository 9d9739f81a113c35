"""The rounders of the grid types: scales as llama.cpp's search gives them, then better ones under feedback.

A block's d is first that of the stock encoder, then the one that would fit best what has come of it, then
some around that. Of all these each row keeps the cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from calibrate.rounding.base import Effort, Rounder
from calibrate.rounding.factor import Panel
from calibrate.rounding.grids import blocks as kernels
from calibrate.rounding.grids import refinement
from calibrate.rounding.grids.blocks import ELEMS, Choices, Form
from calibrate.rounding.grids.layouts import LAYOUTS, Blocks, Layout
from calibrate.rounding.grids.octets import Lattice
from calibrate.rounding.grids.refinement import Ground, State
from calibrate.rounding.grids.trees import tree
from gguf_tools.format.ggml_types import GGMLType
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, as_source
from quantize.formats.iq import grids
from quantize.formats.iq.grids import Grid
from quantize.importances.weighting import ColumnWeights
from quantize.simd.lanes import LANES

_LARGEST_HALF = np.float32(65504)

_AROUND = (1.0, 0.95, 1.05, 0.9, 1.1)
"""The factors of the best fitting d whose products are tried, in this order."""


@dataclass(frozen=True, eq=False)
class Attempt:
    """Blocks of some rows and what came of them: an array with one item, or one row of items, per row."""

    d: Floats32
    scales: npt.NDArray[np.int32]
    codes: npt.NDArray[np.int32]
    signs: npt.NDArray[np.int32]
    costs: Floats32
    factors: Floats32

    def replaced_by(self, other: Attempt) -> Attempt:
        """Return, row by row, the cheaper of the two."""
        better = other.costs < self.costs

        def pick(name: str) -> npt.NDArray[Any]:
            ours, theirs = getattr(self, name), getattr(other, name)
            return np.where(better[:, None] if ours.ndim > 1 else better, theirs, ours)

        return Attempt(*(pick(name) for name in ("d", "scales", "codes", "signs", "costs", "factors")))


@dataclass(frozen=True, eq=False)
class GridRounder:
    """The rounder of a type.

    kernel      one of those in `blocks`
    refinement  its twin in `refinement`
    """

    layout: Layout
    grid: Grid
    form: Form
    kernel: Callable[..., None]
    refinement: Callable[..., None]

    @property
    def type(self) -> GGMLType:
        return self.layout.type

    def round_block(self, rows: Floats32, panel: Panel, effort: Effort) -> tuple[Bytes, Floats32]:
        """Round one block of each row to bytes, and decode them; see base.Rounder."""
        codec = get_format(self.type)
        start = self.layout.read(codec.encode(rows, ColumnWeights(panel.importances)))
        best = self.attempt(rows, panel.upper, effort.grid_window, start.d, start.scales)
        fitted = _as_half(np.where(best.factors > 0, best.d * best.factors, best.d))
        for factor in _AROUND[: effort.super_scales - 1]:
            d = _as_half(fitted * np.float32(factor))
            scales = self._scales_for(best, d)
            best = best.replaced_by(self.attempt(rows, panel.upper, effort.grid_window, d, scales))
        data = self.layout.write(self.blocks(best))
        return data, codec.decode(data, rows.shape[1])

    def attempt(
        self,
        rows: Floats32,
        upper: Floats32,
        window: int,
        d: Floats32,
        scales: npt.NDArray[np.integer],
    ) -> Attempt:
        """Return blocks with these d, float32 (n_rows,), and scales up to `window` from those given."""
        n_rows, form = len(rows), self.form
        padded = n_rows + -n_rows % LANES
        choices = Choices(
            d=_padded(d),
            scales=_padded(scales.T.astype(np.int32)).reshape(-1),
            codes=np.empty(32 * form.codes * padded, np.int32),
            signs=np.empty(32 * padded, np.int32),
            costs=np.empty(padded, np.float32),
            factors=np.empty(padded, np.float32),
        )
        diagonal = np.diag(upper)
        lattice = Lattice(tree(self.grid), self._values, (upper / diagonal).reshape(-1))
        self.kernel(form, lattice, 1 / diagonal, window, as_source(rows), choices)
        return Attempt(
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
        n_rows = len(data)
        start = self.layout.read(data)
        state = State(
            d=_padded(start.d),
            scales=_padded(start.scales.T.astype(np.int32)).reshape(-1),
            codes=_padded(self.grid.codes[start.indices].T).reshape(-1),
            signs=_padded(start.signs.T.astype(np.int32)).reshape(-1),
        )
        decode = get_format(self.type).decode
        values = decode(data, ELEMS)
        self.refinement(
            self.form,
            self._ground(panel),
            effort.grid_window,
            as_source(pulls),
            as_source(values),
            state,
        )
        d, scales, codes, signs = (_by_row(parts, n_rows) for parts in state)
        better = self.layout.write(
            Blocks(d[:, 0], scales.astype(np.int64), self._index_of_code[codes], signs.astype(np.uint8))
        )
        return better, decode(better, ELEMS) - values

    def _ground(self, panel: Panel) -> Ground:
        """Prepare what a block's columns cost."""
        size = self.form.sub_elems
        uppers = panel.local_uppers(size)
        places = np.arange(ELEMS)
        starts = places // size * size
        diagonal = uppers[places, places % size]
        ratios = np.zeros((ELEMS, ELEMS), np.float32)
        columns = starts[:, None] + np.arange(size)
        ratios[places[:, None], columns] = uppers / diagonal[columns]
        lattice = Lattice(tree(self.grid), self._values, ratios.reshape(-1))
        return Ground(as_source(panel.hessian), lattice, diagonal, np.float32(1) / diagonal)

    def _scales_for(self, attempt: Attempt, d: Floats32) -> npt.NDArray[np.int32]:
        """Return the scales, int32 (n_rows, sub-blocks), that with other d come nearest to an attempt's."""
        offset, slope, top = self.form.offset, self.form.slope, self.form.top
        ratio = np.divide(attempt.d, d, out=np.ones_like(d), where=d > 0)
        wanted = ((offset + slope * attempt.scales) * ratio[:, None] - offset) / slope
        return np.clip(np.rint(wanted), 0, top).astype(np.int32)

    def blocks(self, attempt: Attempt) -> Blocks:
        """Return the blocks of an attempt, as layouts write them."""
        return Blocks(
            attempt.d,
            attempt.scales.astype(np.int64),
            self._index_of_code[attempt.codes],
            attempt.signs.astype(np.uint8),
        )

    @cached_property
    def _values(self) -> Floats32:
        """What the levels decode to, by the bits of a code: float32 (16,)."""
        values = np.zeros((16 >> self.grid.code_bits, 1 << self.grid.code_bits), np.float32)
        values[:, : self.grid.base] = self.grid.values
        return values.reshape(-1)

    @cached_property
    def _index_of_code(self) -> npt.NDArray[np.int64]:
        indices = np.zeros(int(self.grid.codes.max()) + 1, np.int64)
        indices[self.grid.codes] = np.arange(len(self.grid.codes))
        return indices


def _padded(parts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array with its last axis, rows, filled up to a multiple of LANES by repeating the last."""
    fill = [(0, 0)] * (parts.ndim - 1) + [(0, -parts.shape[-1] % LANES)]
    return np.pad(parts, fill, "edge")


def _by_row(parts: npt.NDArray[Any], n_rows: int) -> npt.NDArray[Any]:
    """Return what a kernel made, (items * padded rows,), as (n_rows, items)."""
    return parts.reshape(-1, n_rows + -n_rows % LANES).T[:n_rows]


def _as_half(d: Floats32) -> Floats32:
    """Return d as a float16 holds it, but finite."""
    return np.minimum(d, _LARGEST_HALF).astype(np.float16).astype(np.float32)


def _form(sub_elems: int, codes: int, variants: int, offset: float, slope: float, top: int) -> Form:
    return Form(sub_elems, codes, variants, np.float32(offset), np.float32(slope), top)


def _rounder(
    name: str, grid: Grid, form: Form, kernel: Callable[..., None], refinement: Callable[..., None]
) -> GridRounder:
    return GridRounder(LAYOUTS[name], grid, form, kernel, refinement)


ROUNDERS: Mapping[str, Rounder] = {
    rounder.type.name: rounder
    for rounder in (
        _rounder(
            "IQ1_S",
            grids.IQ1,
            _form(32, 1, 2, 1, 2, 7),
            kernels.round_shifted_eights,
            refinement.refine_shifted_eights,
        ),
        _rounder(
            "IQ1_M",
            grids.IQ1,
            _form(16, 1, 1, 1, 2, 7),
            kernels.round_eights_by_shift,
            refinement.refine_eights_by_shift,
        ),
        _rounder(
            "IQ2_XXS",
            grids.IQ2_XXS,
            _form(32, 1, 1, 0.125, 0.25, 15),
            kernels.round_even_eights,
            refinement.refine_even_eights,
        ),
        _rounder(
            "IQ2_XS",
            grids.IQ2_XS,
            _form(16, 1, 1, 0.125, 0.25, 15),
            kernels.round_even_eights,
            refinement.refine_even_eights,
        ),
        _rounder(
            "IQ2_S",
            grids.IQ2_S,
            _form(16, 1, 1, 0.125, 0.25, 15),
            kernels.round_eights,
            refinement.refine_eights,
        ),
        _rounder(
            "IQ3_XXS",
            grids.IQ3_XXS,
            _form(32, 2, 1, 0.25, 0.5, 15),
            kernels.round_even_fours,
            refinement.refine_even_fours,
        ),
        _rounder(
            "IQ3_S", grids.IQ3_S, _form(32, 2, 1, 1, 2, 15), kernels.round_fours, refinement.refine_fours
        ),
    )
}
"""The rounders by the name of the type."""
