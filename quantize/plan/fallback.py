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


def fit(wanted: GGMLType, n_cols: int, named: Override | None = None, n_rows: int = 0) -> Fit | None:
    """Return the type to use for a matrix of rows of `n_cols` elements where `wanted` was asked for.

    named   the user's fallback for this tensor, which is asked only when the rows do not fit
    n_rows  rows of the matrix, for types that interleave rows
    Returns None when neither fits, or when the type has no fallback.
    """
    misfit = describe_misfit(wanted, n_cols, n_rows)
    if not misfit:
        return Fit(wanted, None)
    instead = _by_table(wanted, n_cols, n_rows) if named is None else named.type
    if instead is None or describe_misfit(instead, n_cols, n_rows):
        return None
    by_whom = "" if named is None else f" (fallback {named.text})"
    return Fit(instead, f"{misfit}: {wanted.name} -> {instead.name}{by_whom}")


def describe_misfit(type_: GGMLType, n_cols: int, n_rows: int) -> str:
    """Return why a type can't hold a matrix, in a phrase, or "" when it can."""
    if n_cols % type_.block_elems:
        return f"row length {n_cols} is no multiple of {type_.block_elems}"
    # A type without a codec is refused as such, whatever the rows.
    if n_rows % type_.rows_interleaved and type_.name in CODECS:
        return f"{n_rows} rows are no multiple of {type_.rows_interleaved}"
    return ""


def _by_table(wanted: GGMLType, n_cols: int, n_rows: int) -> GGMLType | None:
    codec = CODECS.get(wanted.name)
    if codec is not None and codec.falls_back_to is not None:
        instead = by_name(codec.falls_back_to)
    elif wanted.block_elems <= 32:
        instead = wanted
    else:
        return None
    return F16 if describe_misfit(instead, n_cols, n_rows) else instead
