"""Codes on their way from level to level, of types whose weights are rounded one by one.

A weight is slope * level - low, with slope and low those of its sub-block. The level need not be one of the
type's while it moves: its place starts where the original's weight would be, but within reach of the level
that the file has, and what the model computes with is the level next to it. A derivative by that is taken as
one by the place (the straight-through estimator, Bengio et al., arXiv 1308.3432). So weights that lie between
two levels change sides first, and most never do.

Steps are Adam's (Kingma and Ba, arXiv 1412.6980), in units of the distance between two levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from calibrate.refine.changed import ChangedTensor
from calibrate.rounding.scalar.blocks import ScalarLayout
from calibrate.rounding.scalar.layouts import LAYOUTS
from gguf_tools.format.ggml_types import GGMLType
from quantize.fill.sources import SourceTensor
from quantize.formats.base import Bytes, Floats32

_MEAN, _SQUARE = 0.9, 0.95
"""Decays of the two running means, for runs of a few dozen steps."""

_MARGIN = 0.01
"""How near to the middle between two levels a place may start, in units of their distance."""

_NO_SQUARE = np.float32(1e-30)
"""What keeps a weight without a derivative, of a sub-block of zeros say, where it is."""

_LAYOUTS: dict[str, ScalarLayout] = {layout.type.name: layout for layout in LAYOUTS}


def has_codes(type_: GGMLType) -> bool:
    """Whether the weights of a type have codes that can move."""
    return type_.name in _LAYOUTS


class RecodedTensor(ChangedTensor):
    """A stored tensor with other codes.

    rows  returns its bytes as they are now, uint8 (n_rows, row bytes)
    """

    def __init__(self, tensor: SourceTensor, rows: Callable[[], Bytes]) -> None:
        self.tensor, self._rows = tensor, rows

    def stored_rows(self, start: int, stop: int) -> Bytes:
        return self._rows()[start:stop]


class MovingCodes:
    """The codes of a tensor on their way."""

    def __init__(self, tensor: SourceTensor, original: SourceTensor) -> None:
        """Start with the bytes of `tensor`, at the weights of `original`, which has its shape."""
        self._layout: ScalarLayout = _LAYOUTS[tensor.type.name]
        n_rows = math.prod(tensor.shape[:-1])
        self._rows: Bytes = tensor.raw_rows(0, n_rows).reshape(n_rows, -1)
        self._blocks = self._layout.read(self._rows.reshape(-1, tensor.type.block_bytes))
        slopes, lows = self._layout.lines(self._blocks)
        self._slopes, self._shape = slopes[..., None], (*slopes.shape, self._layout.sub_elems)
        levels = self._layout.levels
        self._gap = float(levels[-1] - levels[0]) / (len(levels) - 1)
        self._is_even = bool(np.all(np.diff(levels) == 1))
        self._middles = (levels[1:] + levels[:-1]) / 2
        ends = levels[:1] - self._gap / 2, levels[-1:] + self._gap / 2
        self._edges: Floats32 = np.concatenate((ends[0], self._middles, ends[1])).astype(np.float32)
        weights = original.read_rows(0, n_rows).astype(np.float32).reshape(self._shape)
        self._places = self._first_places(weights + np.broadcast_to(lows, slopes.shape)[..., None])
        self._mean, self._square = np.zeros_like(self._places), np.zeros_like(self._places)
        self._n_steps = 0

    def current(self) -> Bytes:
        """Return the bytes as they are now, uint8 (n_rows, row bytes)."""
        return self._rows

    def step(self, by_weight: Floats32, rate: float) -> None:
        """Move all places against the derivative by the weights, float32 (n_rows, n_cols).

        rate  how far a place moves whose derivatives agree, in units of the distance between two levels
        """
        self._n_steps += 1
        places, mean, square = self._places, self._mean, self._square
        gradient = by_weight.reshape(self._shape) * self._slopes
        gradient[(places < self._edges[0]) | (places > self._edges[-1])] = 0
        mean += np.float32(1 - _MEAN) * (gradient - mean)
        square += np.float32(1 - _SQUARE) * (np.square(gradient) - square)
        of_mean, of_square = 1 - _MEAN**self._n_steps, 1 - _SQUARE**self._n_steps
        length = rate * self._gap * math.sqrt(of_square) / of_mean
        places -= np.float32(length) * mean / np.maximum(np.sqrt(square), _NO_SQUARE)
        codes = self._nearest()
        if not np.array_equal(codes, self._blocks.codes):
            self._blocks = replace(self._blocks, codes=codes)
            self._rows = self._layout.write(self._blocks).reshape(self._rows.shape)

    def _nearest(self) -> npt.NDArray[np.uint8]:
        """Return the number of the level next to each place, (n_blocks, elements)."""
        if self._is_even:
            numbers = np.rint(self._places - self._layout.levels[0]).clip(0, len(self._middles))
        else:
            numbers = np.searchsorted(self._middles, self._places)
        codes: npt.NDArray[np.uint8] = numbers.astype(np.uint8).reshape(self._blocks.codes.shape)
        return codes

    def _first_places(self, heights: Floats32) -> Floats32:
        """Return where weights start: at heights / slope, but nearest to the level that they have."""
        codes = self._blocks.codes.reshape(self._shape).astype(np.intp)
        margin = _MARGIN * self._gap
        divisor = np.where(self._slopes == 0, np.inf, self._slopes)
        lowest, highest = self._edges[codes] + margin, self._edges[codes + 1] - margin
        places: Floats32 = np.clip(heights / divisor, lowest, highest).astype(np.float32)
        return np.where(self._slopes == 0, self._layout.levels[codes], places).astype(np.float32)
