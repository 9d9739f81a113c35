"""Fallback: what a row that is no whole number of blocks becomes instead.

The table is llama.cpp's (llama-quant.cpp: tensor_type_fallback): a type of large blocks gives way to one of
32 with about as many bits; where not even 32 divides the row, to F16. For a few types nothing is defined.
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf_tools.ggml_types import F16, GGMLType, by_name

SMALLER_BLOCKS: dict[str, str] = {
    "IQ1_S": "IQ4_NL",
    "IQ1_M": "IQ4_NL",
    "IQ2_XXS": "IQ4_NL",
    "IQ2_XS": "IQ4_NL",
    "IQ2_S": "IQ4_NL",
    "IQ3_XXS": "IQ4_NL",
    "IQ3_S": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
    "Q2_0": "Q4_0",
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}


@dataclass(frozen=True)
class Fit:
    """The type that can hold a row, and why it is another than asked for (None when it is the same)."""

    type: GGMLType
    reason: str | None


def fit(wanted: GGMLType, n_cols: int) -> Fit | None:
    """Return the type to use for rows of `n_cols` elements where `wanted` was asked for.

    Returns None when the row does not fit and the type has no fallback.
    """
    if n_cols % wanted.block_elems == 0:
        return Fit(wanted, None)
    if wanted.name in SMALLER_BLOCKS:
        instead = by_name(SMALLER_BLOCKS[wanted.name])
    elif wanted.block_elems <= 32:
        instead = wanted
    else:
        return None
    if n_cols % instead.block_elems:
        instead = F16
    return Fit(
        instead,
        f"row length {n_cols} is no multiple of {wanted.block_elems}: {wanted.name} -> {instead.name}",
    )
