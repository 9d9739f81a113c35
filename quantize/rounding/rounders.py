"""The table of the types that can be rounded with feedback."""

from __future__ import annotations

from collections.abc import Mapping

from gguf_tools.errors import QuantError
from gguf_tools.format.ggml_types import GGMLType
from quantize.rounding.base import Rounder
from quantize.rounding.grids.rounders import GRID_ROUNDERS
from quantize.rounding.scalar.layouts import SCALAR_ROUNDERS

ROUNDERS: Mapping[str, Rounder] = {each.type.name: each for each in (*SCALAR_ROUNDERS, *GRID_ROUNDERS)}
"""By name of the type."""


def can_compensate(type_: GGMLType) -> bool:
    """Whether rows can be encoded as `type_` under second moments."""
    return type_.name in ROUNDERS


def get_rounder(type_: GGMLType) -> Rounder:
    """Look up the rounder of a type.

    raises  QuantError for a type without one
    """
    if not can_compensate(type_):
        raise QuantError(
            f"{type_.name}: no rounding with feedback for this type; there is for {', '.join(ROUNDERS)}"
        )
    return ROUNDERS[type_.name]


def rounds_in_groups(type_: GGMLType) -> bool:
    """Whether a type's weights are rounded in groups, to points of a grid, which takes far longer."""
    return any(each.type == type_ for each in GRID_ROUNDERS)
