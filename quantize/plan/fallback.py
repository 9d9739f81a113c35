"""Fallback: what a row that is no whole number of blocks becomes instead.

A user may name the type (`--fallback REGEX=TYPE`). Otherwise the table is llama.cpp's (llama-quant.cpp:
tensor_type_fallback): a type of large blocks gives way to one of 32 with about as many bits; where not even
32 divides the row, to F16. For a few types nothing is defined.

In DeepSeek models the tensor concerned is `attn_k_b`: its rows are one head's keys before rotation, 128
elements, which no block of 256 divides. What the table gives it is kept as the default, because so its bytes
are llama-quantize's, and because it never has fewer bits than what was asked for: Q4_0 for Q2_K and Q3_K,
Q5_0 for Q4_K, Q5_1 for Q5_K, Q8_0 for Q6_K, IQ4_NL for the IQ types. `attn_k_b` is 0.2 % of V2-Lite's weights
and 0.08 % of V3's, so the difference in size is small.

ik_llama.cpp's table is another one (llama-quantize.cpp: change_type_if_necessary). It holds for its own types
and under its own file types. A matrix whose rows fill no group of an interleaved type gets the base type.
"""

from __future__ import annotations

from gguf_tools.format.ggml_types import F16, GGMLType, by_name
from quantize.formats.codecs import CODECS, LOOSE_BASES, REGROUPED, codec_of
from quantize.plan.overrides import Override
from quantize.roles import Program


def fit(
    wanted: GGMLType,
    n_cols: int,
    named: Override | None = None,
    n_rows: int = 0,
    program: Program = "llama.cpp",
) -> tuple[GGMLType, str] | None:
    """Return the type to use for a matrix of rows of `n_cols` elements where `wanted` was asked for, and why.

    The reason is "" for the same type.
    named    the user's fallback for this tensor, which is asked only when the rows do not fit
    n_rows   rows of the matrix, for types that interleave rows
    program  whose table is asked first
    Returns None when neither fits, or when the type has no fallback.
    """
    misfit = describe_misfit(wanted, n_cols, n_rows)
    if not misfit:
        return wanted, ""
    instead = _by_table(wanted, n_cols, n_rows, program) if named is None else named.type
    if instead is None or describe_misfit(instead, n_cols, n_rows):
        return None
    by_whom = "" if named is None else f" (fallback {named.text})"
    return instead, f"{misfit}: {wanted.name} -> {instead.name}{by_whom}"


def describe_misfit(type_: GGMLType, n_cols: int, n_rows: int) -> str:
    """Return why a type can't hold a matrix, in a phrase, or "" when it can."""
    if n_cols % type_.block_elems:
        return f"row length {n_cols} is no multiple of {type_.block_elems}"
    # Other types without a codec are refused as such, whatever the rows.
    is_known = codec_of(type_.name) is not None or without_interleaving(type_) != type_
    if n_rows % type_.rows_interleaved and is_known:
        return f"{n_rows} rows are no multiple of {type_.rows_interleaved}"
    return ""


def without_interleaving(type_: GGMLType) -> GGMLType:
    """Return the base type of an interleaved type, and any other type as it is."""
    name = REGROUPED.get(type_.name) or LOOSE_BASES.get(type_.name)
    return type_ if name is None else by_name(name)


def _by_table(wanted: GGMLType, n_cols: int, n_rows: int, program: Program) -> GGMLType | None:
    base = without_interleaving(wanted)
    if n_cols % wanted.block_elems == 0 and base != wanted and wanted.name not in CODECS:
        return base
    codec = codec_of(wanted.name) or codec_of(base.name)
    instead = None if codec is None else codec.fallback(program)
    if instead is None and base.block_elems <= 32:
        instead = base.name
    if instead is None:
        return None
    type_ = by_name(instead)
    return F16 if describe_misfit(type_, n_cols, n_rows) else type_
