"""Contents of the blocks of a type, as arrays: scales, minimums and codes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats.base import Bytes, Floats32

Codes = npt.NDArray[Any]
"""uint8; type checkers take uint8 & 1 for another type."""

Integers = npt.NDArray[np.int32]

Fields = npt.NDArray[Any]
"""Blocks as a structured array, (n,) of the type's `block_dtype`."""


@dataclass(frozen=True, eq=False)
class ScalarBlocks:
    """The blocks of n rows, cut into sub-blocks that have a scale each.

    d, dmin  float32 (n, 1), the scales of the scales and of the minimums, as stored; or (n, sub-blocks),
             where each sub-block is a block of its own
    scales   int32 (n, sub-blocks), integer scales
    lows     int32 (n, sub-blocks), integer minimums
    codes    uint8 (n, elements), the number of each weight's level, counted from the lowest
    """

    d: Floats32
    dmin: Floats32
    scales: Integers
    lows: Integers
    codes: Codes


class ScalarLayout(Protocol):
    """Where a type keeps what `ScalarBlocks` holds, and what it may be changed to.

    type         the type
    sub_elems    elements that share a scale, a multiple of 16
    levels       float32, what the codes stand for, ascending
    is_refitted  whether d and dmin are shared by several sub-blocks, and fitted again once these are chosen
    """

    @property
    def type(self) -> GGMLType: ...
    @property
    def sub_elems(self) -> int: ...
    @property
    def levels(self) -> Floats32: ...
    @property
    def is_refitted(self) -> bool: ...

    def read(self, data: Bytes) -> ScalarBlocks:
        """Take the blocks of n rows, uint8 (n, bytes), apart into arrays."""

    def write(self, blocks: ScalarBlocks) -> Bytes:
        """Pack blocks into uint8 (n, bytes): the inverse of `read`."""

    def lines(self, blocks: ScalarBlocks) -> tuple[Floats32, Floats32]:
        """Compute slope and low of each sub-block, float32 (n, sub-blocks): a value is slope * level - low.

        The product and the difference are each rounded to float32, as in the decoder.
        """

    def begin(self, stock: ScalarBlocks) -> ScalarBlocks:
        """Give the scales and minimums that a search begins with, from the stock encoder's blocks."""

    def neighbours(self, blocks: ScalarBlocks, window: int) -> ScalarBlocks:
        """List what blocks become with scales and minimums up to `window` steps away, themselves first.

        All fields but the codes, which stay, have one axis more, the first: the number of the neighbour, or 1
        where neighbours are the same. Each sub-block may take scale and minimum from another neighbour.
        """


@cache
def moves(of_scale: int, of_low: int) -> tuple[Integers, Integers]:
    """List the steps that scales and minimums can take together, up to so many each, the nearest first.

    Both are int32 (count, 1, 1), count an even number: kernels try two at a time.
    """
    pairs = sorted(
        product(range(-of_scale, of_scale + 1), range(-of_low, of_low + 1)),
        key=lambda pair: abs(pair[0]) + abs(pair[1]),
    )
    steps = np.array(pairs + pairs[-1:] * (len(pairs) % 2), np.int32)
    return steps[:, 0].reshape(-1, 1, 1), steps[:, 1].reshape(-1, 1, 1)


def within(numbers: Integers, lowest: int, highest: int) -> Integers:
    """Limit integers to lowest .. highest; np.clip takes ten times as long for a few of them."""
    return np.minimum(np.maximum(numbers, np.int32(lowest)), np.int32(highest))


def chosen(neighbours: ScalarBlocks, choices: Integers, codes: Codes) -> ScalarBlocks:
    """Take, for each sub-block, the scale and minimum of one neighbour.

    choices  int32 (n, sub-blocks), numbers of neighbours
    codes    those that go with the choice
    """

    def pick(options: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if len(options) == 1:
            return options[0]
        picked: npt.NDArray[Any] = np.take_along_axis(options, choices[None], 0)[0]
        return picked

    lines = neighbours
    return ScalarBlocks(pick(lines.d), pick(lines.dmin), pick(lines.scales), pick(lines.lows), codes)


def halves(values: Floats32) -> npt.NDArray[np.uint16]:
    """Round float32 to float16 bits, to nearest even."""
    return values.astype(np.float16).view(np.uint16)


def as_half(values: npt.NDArray[np.floating[Any]]) -> Floats32:
    """Round values to what float16 holds; beyond its range, to the largest there is."""
    largest = np.finfo(np.float16).max
    return np.clip(values, -largest, largest).astype(np.float16).astype(np.float32)


def integers(lowest: int, highest: int) -> Floats32:
    """List lowest .. highest as levels."""
    return np.arange(lowest, highest + 1, dtype=np.float32)
