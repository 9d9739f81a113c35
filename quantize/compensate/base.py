"""What a type provides so that its blocks can be rounded with feedback.

A rounder chooses the bytes of up to PANEL columns at a time. The driver (feedback.py) hands it weights that
already make up for the errors of earlier columns, and carries its errors on to later ones.

What every rounder owes:

  - The bytes of a row depend on that row, on the factor and on the effort; never on the rows beside it, on
    threads or on the machine.
  - `values` are what the type's decoder makes of `data`, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gguf_tools.ggml_types import GGMLType
from quantize.formats.base import Bytes, Floats32

PANEL = 256
"""The most columns that are rounded before their errors are fed back: a multiple of all types' blocks."""


@dataclass(frozen=True)
class Effort:
    """How much is spent on the search for better bytes.

    scale_window  how many steps the integer scales and minimums of a sub-block may leave the ones that
                  llama.cpp's search gives, while the weights are rounded under them with feedback
    super_scales  how many scales of the scales are tried for a block of a grid type, 1 to 6
    """

    scale_window: int = 1
    super_scales: int = 4


DEFAULT = Effort()


class Rounder(Protocol):
    """A type that can be rounded with feedback."""

    @property
    def type(self) -> GGMLType: ...

    def round_block(
        self, rows: Floats32, upper: Floats32, importances: Floats32, effort: Effort
    ) -> tuple[Bytes, Floats32]:
        """Return the bytes of some columns of each row, and the values that they stand for.

        The bytes are to make the sum of ((w'[i] - v[i]) / upper[i, i])**2 small, where w' are the weights
        after feedback from one of these columns to the next, as factor.py says.

        rows         float32 (n_rows, n), C-contiguous and finite; n is PANEL, or less at the end of a row,
                     and a multiple of the elements of a block
        upper        float32 (n, n), the factor's `upper` for these columns, C-contiguous
        importances  float32 (n,), the factor's `importances` for these columns
        returns      uint8 (n_rows, bytes of n columns), float32 (n_rows, n)
        raises       BadWeights where the type can't hold what feedback has made of the weights
        """
        ...
