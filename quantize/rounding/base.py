"""Protocols that a type provides so that its blocks can be rounded with feedback.

A rounder chooses the bytes of up to PANEL columns at a time. feedback.py gives it weights that already make
up for the errors of earlier columns, and carries its errors on to later ones.

What every rounder must keep to:

  - The bytes of a row depend on that row, on the factor and on the effort. They never depend on the rows
    beside it, on threads or on the machine.
  - `values` are what the type's decoder makes of `data`, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats.base import Bytes, Floats32
from quantize.rounding.factor import Panel

PANEL = 256
"""The most columns that are rounded before their errors are fed back: a multiple of all types' blocks."""

MOST_STEPS = 3
"""The largest window: with minimums it has 7 * 7 candidates."""


@dataclass(frozen=True)
class Effort:
    """How much is spent on the search for better bytes.

    raises  ValueError for numbers below 0, and a window above MOST_STEPS

    scale_window  how many steps away from the scales and minimums of llama.cpp's search a sub-block may go,
                  while its weights are rounded with feedback
    super_scales  how many scales of the scales are tried for a block of a grid type, 1 to 6
    grid_window   the window of grid types, whose candidates take far longer
    sweeps        how often all blocks of a row are chosen anew, with the others as they are; it ends earlier
                  where that changes nothing any more
    """

    scale_window: int = 3
    super_scales: int = 2
    grid_window: int = 1
    sweeps: int = 2

    def __post_init__(self) -> None:
        for window in (self.scale_window, self.grid_window):
            if not 0 <= window <= MOST_STEPS:
                raise ValueError(f"a window must be 0 to {MOST_STEPS} steps, found {window}")
        if self.sweeps < 0:
            raise ValueError(f"sweeps must be 0 or more, found {self.sweeps}")


DEFAULT = Effort()


class Rounder(Protocol):
    """A type that can be rounded with feedback."""

    @property
    def type(self) -> GGMLType: ...

    def round_block(self, rows: Floats32, panel: Panel, effort: Effort) -> tuple[Bytes, Floats32]:
        """Round some columns of each row to bytes, and decode the values that these stand for.

        The bytes are to make the sum of ((w'[i] - v[i]) / U[i, i])**2 small, where w' are the weights after
        feedback from one of these columns to the next, as factor.py says.

        rows     float32 (n_rows, n), C-contiguous and finite; n is PANEL, or less at the end of a row, and a
                 multiple of the elements of a block
        panel    the factor's view of these columns
        returns  uint8 (n_rows, bytes of n columns), float32 (n_rows, n)
        raises   BlockRefused where the type can't hold what feedback has made of the weights
        """


@runtime_checkable
class Refiner(Protocol):
    """A rounder that can choose its blocks anew once a row is complete."""

    def refine_block(
        self, data: Bytes, pulls: Floats32, panel: Panel, effort: Effort
    ) -> tuple[Bytes, Floats32]:
        """Find better bytes for a block of columns, and how far their values move.

        Values that move by m cost m H m^T - 2 p m^T more, with p the pulls and H the moments of these
        columns. It is never above 0, but for the rounding of sums.

        data     uint8 (n_rows, bytes of n columns), the bytes so far; n as in `Rounder.round_block`
        pulls    float32 (n_rows, n), the part in these columns of e H, e the errors of whole rows
        panel    the factor's view of these columns
        returns  uint8 (n_rows, bytes of n columns), float32 (n_rows, n)
        """
