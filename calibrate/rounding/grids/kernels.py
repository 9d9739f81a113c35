"""The kernels of each kind of octet: one rounds blocks, the other chooses their sub-blocks anew.

They are written out because numba finds a kernel in its cache by its name in a module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from calibrate.rounding.grids.blocks import Choices, Terms, round_rows
from calibrate.rounding.grids.octets import (
    round_either_shift,
    round_even_4,
    round_even_8,
    round_free_4,
    round_free_8,
    round_shifted,
)
from calibrate.rounding.grids.refinement import Ground, State, refine_rows
from quantize.formats.base import Floats32
from quantize.simd.kernel import kernel


class Kernels(NamedTuple):
    """The kernels of a kind of octet."""

    round: Callable[[Terms, Floats32, Choices], None]
    refine: Callable[[Terms, Ground, State], None]


@kernel
def _round_eights(terms: Terms, source: Floats32, choices: Choices) -> None:
    round_rows(round_free_8, terms, source, choices)


@kernel
def _refine_eights(terms: Terms, ground: Ground, state: State) -> None:
    refine_rows(round_free_8, terms, ground, state)


@kernel
def _round_even_eights(terms: Terms, source: Floats32, choices: Choices) -> None:
    round_rows(round_even_8, terms, source, choices)


@kernel
def _refine_even_eights(terms: Terms, ground: Ground, state: State) -> None:
    refine_rows(round_even_8, terms, ground, state)


@kernel
def _round_fours(terms: Terms, source: Floats32, choices: Choices) -> None:
    round_rows(round_free_4, terms, source, choices)


@kernel
def _refine_fours(terms: Terms, ground: Ground, state: State) -> None:
    refine_rows(round_free_4, terms, ground, state)


@kernel
def _round_even_fours(terms: Terms, source: Floats32, choices: Choices) -> None:
    round_rows(round_even_4, terms, source, choices)


@kernel
def _refine_even_fours(terms: Terms, ground: Ground, state: State) -> None:
    refine_rows(round_even_4, terms, ground, state)


@kernel
def _round_shifted_eights(terms: Terms, source: Floats32, choices: Choices) -> None:
    round_rows(round_shifted, terms, source, choices)


@kernel
def _refine_shifted_eights(terms: Terms, ground: Ground, state: State) -> None:
    refine_rows(round_shifted, terms, ground, state)


@kernel
def _round_eights_by_shift(terms: Terms, source: Floats32, choices: Choices) -> None:
    round_rows(round_either_shift, terms, source, choices)


@kernel
def _refine_eights_by_shift(terms: Terms, ground: Ground, state: State) -> None:
    refine_rows(round_either_shift, terms, ground, state)


EIGHTS = Kernels(_round_eights, _refine_eights)
"""Of IQ2_S."""
EVEN_EIGHTS = Kernels(_round_even_eights, _refine_even_eights)
"""Of IQ2_XXS and IQ2_XS."""
FOURS = Kernels(_round_fours, _refine_fours)
"""Of IQ3_S."""
EVEN_FOURS = Kernels(_round_even_fours, _refine_even_fours)
"""Of IQ3_XXS."""
SHIFTED_EIGHTS = Kernels(_round_shifted_eights, _refine_shifted_eights)
"""Of IQ1_S, whose two variants are shifts."""
EIGHTS_BY_SHIFT = Kernels(_round_eights_by_shift, _refine_eights_by_shift)
"""Of IQ1_M."""
