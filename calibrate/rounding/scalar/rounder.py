"""The rounder of a layout: scales as llama.cpp's search gives them, then the best of their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from calibrate.rounding.base import Effort
from calibrate.rounding.factor import Panel
from calibrate.rounding.scalar.blocks import Layout, chosen
from calibrate.rounding.scalar.refinement import refine_evenly, refine_unevenly
from calibrate.rounding.scalar.refit import refit
from calibrate.rounding.scalar.rounding import round_evenly, round_unevenly
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
        n_rows, n = rows.shape
        start = layout.begin(layout.read(codec.encode(rows, ColumnWeights(panel.importances))))
        neighbours = layout.neighbours(start, effort.scale_window)
        slopes, lows = _candidates(*layout.lines(neighbours))
        n_subs, n_candidates, padded = slopes.shape
        codes = np.empty((n_rows, n), np.uint8)
        choices = np.empty((n_subs, padded), np.int32)
        round_blocks = round_evenly if self._is_even else round_unevenly
        round_blocks(
            as_source(rows),
            as_source(panel.upper),
            n,
            layout.sub_elems,
            as_source(layout.levels),
            as_source(slopes),
            as_source(lows),
            n_candidates,
            codes.reshape(-1),
            choices.reshape(-1),
        )
        numbers = choices[:, :n_rows].T
        data = layout.write(chosen(neighbours, numbers, codes))
        return data, codec.decode(data, n)

    def refine_block(
        self, data: Bytes, pulls: Floats32, panel: Panel, effort: Effort
    ) -> tuple[Bytes, Floats32]:
        """Find better bytes, and how far the values move; see base.Refiner."""
        layout, decode = self.layout, get_format(self.type).decode
        n_rows, n = pulls.shape
        blocks, values = layout.read(data), decode(data, n)
        neighbours = layout.neighbours(blocks, 1)
        slopes, lows = _candidates(*layout.lines(neighbours))
        n_subs, n_candidates, padded = slopes.shape
        codes = np.empty((n_rows, n), np.uint8)
        choices = np.empty((n_subs, padded), np.int32)
        moves = np.empty_like(pulls)
        pulls = pulls.copy()
        refine_blocks = refine_evenly if self._is_even else refine_unevenly
        refine_blocks(
            as_source(values),
            as_source(panel.hessian),
            as_source(panel.local_uppers(layout.sub_elems)),
            n,
            layout.sub_elems,
            as_source(layout.levels),
            as_source(slopes),
            as_source(lows),
            n_candidates,
            pulls.reshape(-1),
            moves.reshape(-1),
            codes.reshape(-1),
            choices.reshape(-1),
        )
        numbers = choices[:, :n_rows].T
        stays = np.repeat(numbers < 0, layout.sub_elems, axis=1)
        codes = np.where(stays, blocks.codes, codes)
        blocks = chosen(neighbours, np.maximum(numbers, 0), codes)
        if not layout.is_refitted:
            return layout.write(blocks), moves
        data = layout.write(refit(layout, blocks, pulls, panel.hessian))
        return data, decode(data, n) - values

    @cached_property
    def _is_even(self) -> bool:
        return bool((np.diff(self.layout.levels) == 1).all())


def _candidates(slopes: Floats32, lows: Floats32) -> tuple[Floats32, Floats32]:
    """Return lines as the kernels read them, float32 (sub-blocks, candidates, padded rows).

    slopes, lows  float32 (candidates, rows, sub-blocks); lows may have one candidate for all
    """
    n_candidates, n_rows, n_subs = slopes.shape
    padded = np.zeros((2, n_subs, n_candidates, -(-n_rows // LANES) * LANES), np.float32)
    padded[0, :, :, :n_rows] = slopes.transpose(2, 0, 1)
    padded[1, :, :, :n_rows] = lows.transpose(2, 0, 1)
    return padded[0], padded[1]
