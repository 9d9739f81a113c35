"""Fallback: what a row that is no whole number of blocks becomes instead.

A user may name the type (`--fallback REGEX=TYPE`). Otherwise the table is llama.cpp's (llama-quant.cpp:
tensor_type_fallback): a type of large blocks gives way to one of 32 with about as many bits; where not even
32 divides the row, to F16. For a few types nothing is defined.

In DeepSeek models the tensor concerned is `attn_k_b`: its rows are one head's keys before rotation, 128
elements, which no block of 256 divides. What the table gives it is kept as the default, because so its bytes
are llama-quantize's, and because it never has fewer bits than what was asked for: Q4_0 for Q2_K and Q3_K,
Q5_0 for Q4_K, Q5_1 for Q5_K, Q8_0 for Q6_K, IQ4_NL for the IQ types. `attn_k_b` is 0.2 % of V2-Lite's weights
and 0.08 % of V3's, so the difference in size is small.
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf_tools.ggml_types import F16, GGMLType, by_name
from quantize.formats.codecs import CODECS
from quantize.plan.overrides import Override


@dataclass(frozen=True)
class Fit:
    """The type that can hold a row, and why it is another than asked for (None when it is the same)."""

    type: GGMLType
    reason: str | None


def fit(wanted: GGMLType, n_cols: int, named: Override | None = None) -> Fit | None:
    """Return the type to use for rows of `n_cols` elements where `wanted` was asked for.

    named  the user's fallback for this tensor, which is asked only when the row does not fit
    Returns None when neither fits, or when the type has no fallback.
    """
    if n_cols % wanted.block_elems == 0:
        return Fit(wanted, None)
    instead = _by_table(wanted, n_cols) if named is None else named.type
    if instead is None or n_cols % instead.block_elems:
        return None
    by_whom = "" if named is None else f" (fallback {named.text})"
    change = f"{wanted.name} -> {instead.name}{by_whom}"
    return Fit(instead, f"row length {n_cols} is no multiple of {wanted.block_elems}: {change}")


def _by_table(wanted: GGMLType, n_cols: int) -> GGMLType | None:
    codec = CODECS.get(wanted.name)
    if codec is not None and codec.falls_back_to is not None:
        instead = by_name(codec.falls_back_to)
    elif wanted.block_elems <= 32:
        instead = wanted
    else:
        return None
    return F16 if n_cols % instead.block_elems else instead
