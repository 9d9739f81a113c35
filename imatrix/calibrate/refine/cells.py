"""Values that the weights of a tensor can have under its scales, and which of these is nearest.

A place is a weight in units of its sub-block's slope: a weight is slope * place - low. Some places have a
code: levels, one for each weight, or points of a grid, one for four or eight weights, with signs. Around each
of these is a cell of the places that it is nearest to.

A weight of the original has a place, too. A file need not have the code nearest to it, as calibration makes
up for the errors of other weights. Then it starts at the end of the file's cell, on the side of that place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats import get_decoder
from quantize.formats.base import Bytes, Floats32
from quantize.rounding.grids.eight_weights import OCTET
from quantize.rounding.grids.kernels import ELEMS
from quantize.rounding.grids.rounders import GRID_ROUNDERS, GridRounder
from quantize.rounding.scalar.blocks import ScalarLayout
from quantize.rounding.scalar.layouts import LAYOUTS

_MARGIN = 0.01
"""How near to the middle between two levels a place may start, in units of their distance."""

_HALVINGS = 6
"""Steps of the search for the end of a cell."""


class Cells(Protocol):
    """The cells of a tensor's weights.

    slopes   float32 (n_sub_blocks, 1)
    shape    of places: (n_sub_blocks, elements)
    gap      distance between two levels
    lowest   of the places that a weight moves on from; beyond it and the next it stays
    highest  the same at the other end
    """

    slopes: Floats32
    shape: tuple[int, int]
    gap: float
    lowest: float
    highest: float

    def first_places(self, weights: Floats32) -> Floats32:
        """Return where the original's weights start, within the cells that the tensor has."""

    def take(self, places: Floats32) -> Bytes | None:
        """Go to the nearest codes; return the blocks that have them, or None if none has changed."""


class LevelCells:
    """The cells of a type of which each weight has a code of its own."""

    def __init__(self, layout: ScalarLayout, data: Bytes) -> None:
        """Start with blocks, uint8 (n, bytes)."""
        self._layout, self._blocks = layout, layout.read(data)
        slopes, lows = layout.lines(self._blocks)
        self.slopes, self.shape = slopes.reshape(-1, 1), (slopes.size, layout.sub_elems)
        self._lows: Floats32 = np.broadcast_to(lows, slopes.shape).reshape(-1, 1)
        levels = layout.levels
        self.gap = float(levels[-1] - levels[0]) / (len(levels) - 1)
        self._is_even = bool(np.all(np.diff(levels) == 1))
        self._middles = (levels[1:] + levels[:-1]) / 2
        self.lowest, self.highest = float(levels[0]) - self.gap / 2, float(levels[-1]) + self.gap / 2

    def first_places(self, weights: Floats32) -> Floats32:
        codes = self._blocks.codes.reshape(self.shape).astype(np.intp)
        edges = np.concatenate(([self.lowest], self._middles, [self.highest])).astype(np.float32)
        margin = np.float32(_MARGIN * self.gap)
        divisor = np.where(self.slopes == 0, np.inf, self.slopes)
        heights = (weights.reshape(self.shape) + self._lows) / divisor
        places = np.clip(heights, edges[codes] + margin, edges[codes + 1] - margin)
        return np.where(self.slopes == 0, self._layout.levels[codes], places).astype(np.float32)

    def take(self, places: Floats32) -> Bytes | None:
        codes = self._nearest(places).reshape(self._blocks.codes.shape)
        if np.array_equal(codes, self._blocks.codes):
            return None
        self._blocks = replace(self._blocks, codes=codes)
        return self._layout.write(self._blocks)

    def _nearest(self, places: Floats32) -> npt.NDArray[np.uint8]:
        if self._is_even:
            return np.rint(places - self._layout.levels[0]).clip(0, len(self._middles)).astype(np.uint8)
        return np.searchsorted(self._middles, places).astype(np.uint8)


class GridCells:
    """The cells of a type whose weights share points of a grid.

    The nearest point is what the type's rounder finds without feedback, at the scale where a level stands for
    its own value.
    """

    def __init__(self, rounder: GridRounder, data: Bytes) -> None:
        """Start with blocks, uint8 (n, bytes)."""
        self._rounder, self._blocks = rounder, rounder.layout.read(data)
        form, values = rounder.form, np.array(rounder.grid.values, np.float32)
        slopes = self._blocks.d[:, None] * (form.offset + form.slope * self._blocks.scales)
        self.slopes = slopes.astype(np.float32).reshape(-1, 1)
        self.shape = slopes.size, form.sub_elems
        self.gap = float(values[-1] - values[0]) / (len(values) - 1)
        self.highest = float(values[-1]) + self.gap / 2
        self.lowest = -self.highest
        self._unit = form.sub_elems if form.variants > 1 else OCTET  # weights whose choices hang together

    def first_places(self, weights: Floats32) -> Floats32:
        points = self._points()
        divisor = np.where(self.slopes == 0, np.inf, self.slopes)
        wanted = (weights.reshape(self.shape) / divisor).astype(np.float32)
        wanted = np.where(self.slopes == 0, points.reshape(self.shape), wanted).reshape(points.shape)
        # A cell is convex: all places between its point and one inside it are inside, too.
        inside: Floats32 = np.zeros(len(points), np.float32)
        for halving in range(_HALVINGS + 1):
            share = inside + np.float32(0.5**halving)
            is_inside = self._is_nearest(points + share[:, None] * (wanted - points))
            inside = np.where((share <= 1) & is_inside, share, inside)
        return (points + inside[:, None] * (wanted - points)).reshape(self.shape)

    def take(self, places: Floats32) -> Bytes | None:
        indices, signs = self._nearest(places)
        if np.array_equal(indices, self._blocks.indices) and np.array_equal(signs, self._blocks.signs):
            return None
        self._blocks = replace(self._blocks, indices=indices, signs=signs)
        return self._rounder.layout.write(self._blocks)

    def _nearest(self, places: Floats32) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Return indices and signs of the nearest points, as `GridBlocks` has them."""
        rows, plain = places.reshape(-1, ELEMS), self._plain()
        found = self._rounder.attempt(rows, np.eye(ELEMS, dtype=np.float32), 0, *plain)
        blocks = self._rounder.blocks(found.d, found.scales, found.codes, found.signs)
        return blocks.indices, blocks.signs

    def _is_nearest(self, places: Floats32) -> npt.NDArray[np.bool_]:
        """Return where the nearest points are those of the tensor, for each unit of places."""
        indices, signs = self._nearest(places)
        n_units = places.size // self._unit
        is_same = (indices == self._blocks.indices).reshape(n_units, -1).all(axis=1)
        return is_same & (signs == self._blocks.signs).reshape(n_units, -1).all(axis=1)

    def _points(self) -> Floats32:
        """Return the values of the tensor's points, float32 (n_units, weights of a unit)."""
        d, scales = self._plain()
        data = self._rounder.layout.write(replace(self._blocks, d=d, scales=scales))
        values: Floats32 = get_decoder(self._rounder.type)(data, ELEMS).astype(np.float32)
        return values.reshape(-1, self._unit)

    def _plain(self) -> tuple[Floats32, npt.NDArray[np.int64]]:
        """Return d and scales with which a level stands for its own value."""
        n = len(self._blocks.d)
        return np.full(n, 1 / self._rounder.form.offset, np.float32), np.zeros_like(self._blocks.scales)


_LEVELS = {layout.type.name: layout for layout in LAYOUTS}
_GRIDS = {rounder.type.name: rounder for rounder in GRID_ROUNDERS}


def has_cells(type_: GGMLType) -> bool:
    """Whether the codes of a type can move."""
    return type_.name in _LEVELS or type_.name in _GRIDS


def cells_of(type_: GGMLType, data: Bytes) -> Cells:
    """Make the cells of blocks of a type, uint8 (n, bytes)."""
    if type_.name in _LEVELS:
        return LevelCells(_LEVELS[type_.name], data)
    return GridCells(_GRIDS[type_.name], data)
