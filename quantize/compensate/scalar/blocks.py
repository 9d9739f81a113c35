"""What the blocks of a type store, as arrays: scales, minimums and codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gguf_tools.ggml_types import GGMLType
from quantize.formats.base import Bytes, Floats32

Codes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Blocks:
    """n blocks, each of some sub-blocks.

    d, dmin  float32 (n,), the scales of the scales and of the minimums, as stored
    scales   int32 (n, sub-blocks), integer scales
    lows     int32 (n, sub-blocks), integer minimums
    codes    uint8 (n, elements), the number of each weight's level, counted from the lowest
    """

    d: Floats32
    dmin: Floats32
    scales: Integers
    lows: Integers
    codes: Codes

    def with_codes(self, codes: Codes) -> Blocks:
        return replace(self, codes=codes)


class Layout(Protocol):
    """Where a type keeps what `Blocks` holds, and what it may be changed to.

    type       the type
    sub_elems  elements that share a scale, a multiple of 16 and at most 32
    lowest     the lowest level, the one of code 0
    highest    the highest level
    """

    @property
    def type(self) -> GGMLType: ...
    @property
    def sub_elems(self) -> int: ...
    @property
    def lowest(self) -> int: ...
    @property
    def highest(self) -> int: ...

    def read(self, data: Bytes) -> Blocks:
        """Return the blocks, uint8 (n, bytes of a block), as arrays."""
        ...

    def write(self, blocks: Blocks) -> Bytes:
        """Return blocks as uint8 (n, bytes of a block): the inverse of `read`."""
        ...

    def lines(self, blocks: Blocks) -> tuple[Floats32, Floats32]:
        """Return slope and low of each sub-block, float32 (n, sub-blocks): a value is slope * level - low.

        The product and the difference are each rounded to float32, as in the decoder.
        """
        ...

    def neighbours(self, blocks: Blocks, window: int) -> Sequence[Blocks]:
        """Return `blocks` itself and what it becomes with scales and minimums up to `window` steps away.

        Codes are left as they are. Each sub-block may take its scale and minimum from another neighbour.
        """
        ...


def chosen(neighbours: Sequence[Blocks], choices: Integers, codes: Codes) -> Blocks:
    """Return, for each sub-block, the scale and minimum of one neighbour.

    choices  int32 (n, sub-blocks), numbers of neighbours
    codes    those that go with the choice
    """

    def pick(name: str, numbers: Integers) -> npt.NDArray[Any]:
        options = np.stack([getattr(blocks, name) for blocks in neighbours])
        picked: npt.NDArray[Any] = np.take_along_axis(options, numbers[None], 0)[0]
        return picked

    of_block = choices[:, 0]  # neighbours differ in d and dmin only where a block is its one sub-block
    return Blocks(
        pick("d", of_block), pick("dmin", of_block), pick("scales", choices), pick("lows", choices), codes
    )
