"""The rounder of a layout: scales as llama.cpp's search gives them, then the best of their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calibrate.rounding.base import Effort
from calibrate.rounding.factor import Panel
from calibrate.rounding.scalar.blocks import Blocks, Codes, Integers, Layout, chosen
from calibrate.rounding.scalar.refinement import Ground, State, refine_blocks, refit
from calibrate.rounding.scalar.rounding import Levels, Lines, Picks, round_blocks
from gguf_tools.format.ggml_types import GGMLType
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, as_source
from quantize.importances.weighting import ColumnWeights
from quantize.simd.lanes import LANES


@dataclass(frozen=True)
class ScalarRounder:
    """The rounder of a type whose weights are rounded one by one."""

    layout: Layout

    @property
    def type(self) -> GGMLType:
        return self.layout.type

    def round_block(self, rows: Floats32, panel: Panel, effort: Effort) -> tuple[Bytes, Floats32]:
        """Round some columns of each row to bytes, and decode them; see base.Rounder."""
        layout, codec = self.layout, get_format(self.type)
        n = rows.shape[1]
        start = layout.begin(layout.read(codec.encode(rows, ColumnWeights(panel.importances))))
        neighbours = layout.neighbours(start, effort.scale_window)
        lines, picks = self._lines(neighbours), _room(start)
        round_blocks(as_source(rows), as_source(panel.upper), n, layout.sub_elems, self._levels, lines, picks)
        codes, numbers = _by_row(picks, start)
        data = layout.write(chosen(neighbours, numbers, codes))
        return data, codec.decode(data, n)

    def refine_block(
        self, data: Bytes, pulls: Floats32, panel: Panel, effort: Effort
    ) -> tuple[Bytes, Floats32]:
        """Find better bytes, and how far the values move; see base.Refiner."""
        layout, decode = self.layout, get_format(self.type).decode
        n = pulls.shape[1]
        blocks, values = layout.read(data), decode(data, n)
        neighbours = layout.neighbours(blocks, 1)
        lines, picks = self._lines(neighbours), _room(blocks)
        uppers = as_source(panel.local_uppers(layout.sub_elems))
        pulls, moves = pulls.copy(), np.empty_like(pulls)
        refine_blocks(
            Ground(as_source(panel.hessian), uppers, n, layout.sub_elems),
            State(as_source(values), pulls.reshape(-1), moves.reshape(-1)),
            self._levels,
            lines,
            picks,
        )
        codes, numbers = _by_row(picks, blocks)
        stays = np.repeat(numbers < 0, layout.sub_elems, axis=1)
        better = chosen(neighbours, np.maximum(numbers, 0), np.where(stays, blocks.codes, codes))
        if not layout.is_refitted:
            return layout.write(better), moves
        data = layout.write(refit(layout, better, pulls, panel.hessian))
        return data, decode(data, n) - values

    @cached_property
    def _levels(self) -> Levels:
        return Levels.of(self.layout.levels)

    def _lines(self, neighbours: Blocks) -> Lines:
        """Arrange the lines of neighbours as kernels read them, rows filled up to a multiple of LANES."""
        slopes, lows = self.layout.lines(neighbours)  # (candidates, rows, sub-blocks); lows perhaps (1, ...)
        count, n_rows, n_subs = slopes.shape
        padded = np.zeros((2, n_subs, count, _padded(n_rows)), np.float32)
        padded[0, :, :, :n_rows] = slopes.transpose(2, 0, 1)
        padded[1, :, :, :n_rows] = lows.transpose(2, 0, 1)
        return Lines(as_source(padded[0]), as_source(padded[1]), count, _padded(n_rows))


def _padded(n_rows: int) -> int:
    return -(-n_rows // LANES) * LANES


def _room(blocks: Blocks) -> Picks:
    """Make room for what kernels choose for blocks."""
    n_rows, n_subs = blocks.scales.shape
    return Picks(np.empty(blocks.codes.size, np.uint8), np.empty(n_subs * _padded(n_rows), np.int32))


def _by_row(picks: Picks, blocks: Blocks) -> tuple[Codes, Integers]:
    """Take codes and numbers apart by row: (n_rows, n), (n_rows, sub-blocks)."""
    n_rows, n_subs = blocks.scales.shape
    return picks.codes.reshape(n_rows, -1), picks.numbers.reshape(n_subs, -1).T[:n_rows]
