"""The table of types that can be rounded with feedback, and where their rounders are."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from calibrate.rounding.base import Rounder
from gguf_tools.errors import QuantError
from gguf_tools.format.ggml_types import GGMLType

ROUNDERS: Mapping[str, str] = {
    "Q2_K": ".scalar.k_quants",
    "Q3_K": ".scalar.k_quants",
    "Q4_K": ".scalar.k_quants",
    "Q5_K": ".scalar.k_quants",
    "Q6_K": ".scalar.k_quants",
    "Q4_0": ".scalar.single_scales",
    "Q4_1": ".scalar.single_scales",
    "Q5_0": ".scalar.single_scales",
    "Q5_1": ".scalar.single_scales",
    "Q8_0": ".scalar.single_scales",
    "IQ4_NL": ".scalar.single_scales",
    "IQ4_XS": ".scalar.k_quants",
    "TQ1_0": ".scalar.single_scales",
    "TQ2_0": ".scalar.single_scales",
    "MXFP4": ".scalar.fp4",
    "NVFP4": ".scalar.fp4",
    "IQ1_S": ".grids.rounders",
    "IQ1_M": ".grids.rounders",
    "IQ2_XXS": ".grids.rounders",
    "IQ2_XS": ".grids.rounders",
    "IQ2_S": ".grids.rounders",
    "IQ3_XXS": ".grids.rounders",
    "IQ3_S": ".grids.rounders",
}
"""The module of each type, relative to this package; its ROUNDERS has the type's rounder.

Written out because whoever asks whether a type is here need not load numba.
"""


def can_compensate(type_: GGMLType) -> bool:
    """Whether rows can be encoded as `type_` under second moments."""
    return type_.name in ROUNDERS


def get_rounder(type_: GGMLType) -> Rounder:
    """Load the rounder of a type.

    raises  QuantError for a type without one
    """
    if not can_compensate(type_):
        raise QuantError(
            f"{type_.name}: no rounding with feedback for this type; there is for {', '.join(ROUNDERS)}"
        )
    rounder: Rounder = import_module(ROUNDERS[type_.name], __package__).ROUNDERS[type_.name]
    return rounder
