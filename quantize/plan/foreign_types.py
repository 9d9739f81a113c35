"""Names of types in other projects: what they mean there, and the nearest file type here.

Sources: the model pages of Unsloth, bartowski and mradermacher, and the documentation of AutoAWQ, AutoGPTQ,
ExLlama, bitsandbytes, MLX and vLLM.
"""

from __future__ import annotations

import re

_BY_BITS = {
    "1": "IQ1_M", "2": "Q2_K", "3": "Q3_K_M", "4": "Q4_K_M", "5": "Q5_K_M", "6": "Q6_K", "8": "Q8_0",
    "16": "F16", "32": "F32",
}  # fmt: skip
"""Bits -> the file type that people mean by so many."""

_LARGE = {
    "Q2_K": "Q2_K", "Q3_K": "Q3_K_L", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "Q6_K": "Q6_K", "Q8_K": "Q8_0",
}  # fmt: skip
"""Type that a name ending in _L or _XL grew from, and the file type nearest to it."""

_FORMATS = {
    "AWQ": ("AutoAWQ's format of 4 bits", "Q4_K_M"),
    "GPTQ": ("AutoGPTQ's format, mostly of 4 bits", "Q4_K_M"),
    "EXL2": ("ExLlama's format, of any size in bits per weight", "Q4_K_M"),
    "EXL3": ("ExLlama's format, of any size in bits per weight", "Q4_K_M"),
    "HQQ": ("a format of 4 bits", "Q4_K_M"),
    "AQLM": ("a format of 2 bits", "IQ2_XS"),
    "MLX": ("Apple's format, mostly of 4 bits", "Q4_K_M"),
    "BNB": ("bitsandbytes' format, mostly of 4 bits", "Q4_K_M"),
    "NF4": ("bitsandbytes' type of 4 bits", "IQ4_NL"),
    "FP4": ("a float of 4 bits", "MXFP4_MOE"),
    "MXFP4": ("a float of 4 bits, which llama.cpp has for experts", "MXFP4_MOE"),
    "FP8": ("a float of 8 bits, which llama.cpp has no type for", "Q8_0"),
    "MXFP8": ("a float of 8 bits, which llama.cpp has no type for", "Q8_0"),
    "Q4_0_4_4": ("Q4_0 interleaved, which llama.cpp now does when it loads a file", "Q4_0"),
    "Q4_0_4_8": ("Q4_0 interleaved, which llama.cpp now does when it loads a file", "Q4_0"),
    "Q4_0_8_8": ("Q4_0 interleaved, which llama.cpp now does when it loads a file", "Q4_0"),
    "GGUF": ("the format of the whole file", "Q4_K_M"),
    "FULL": ("no quantization", "BF16"),
}

_UNSLOTH = re.compile(r"(?:UD-)(?P<type>I?Q\d_[A-Z0-9_]+|TQ\d_\d)|(?P<large>Q[2-8]_K)_XL")
_WITH_MATRIX = re.compile(r"I1-(.+)")
_BITS = re.compile(r"(?:Q|INT|I|U|UINT|W|FP|FLOAT)?(\d+)(?:A\d+)?(?:[-_ ]?BITS?)?")
_INTERLEAVED = re.compile(r"(.+)_R\d+")


def foreign_type(text: str) -> tuple[str, str] | None:
    """Return a name's meaning in another project, and the nearest file type here; None for any other name.

    >>> foreign_type("UD-Q4_K_XL")[1], foreign_type("int4")[1], foreign_type("xyz")
    ('Q4_K_M', 'Q4_K_M', None)
    """
    name = text.strip().upper()
    known = _FORMATS.get(name) or _FORMATS.get(re.split(r"[-_ ]", name)[0])
    if known is not None:
        return known
    if match := _UNSLOTH.fullmatch(name):
        near = _LARGE.get(match["large"] or (match["type"] or "").removesuffix("_XL"), match["type"])
        return "Unsloth's mixture, other types for each model", near or "Q8_0"
    if name.endswith("_L") and name.removesuffix("_L") in _LARGE:
        return "bartowski's mixture with embeddings and output in Q8_0", _LARGE[name.removesuffix("_L")]
    if match := _WITH_MATRIX.fullmatch(name):
        return "mradermacher's word for a file made with an importance matrix", match[1]
    if (match := _BITS.fullmatch(name)) and match[1] in _BY_BITS:
        return f"a number of bits, {match[1]} per weight, and no type", _BY_BITS[match[1]]
    return None


def interleaved_base(text: str) -> str | None:
    """Return the name without the ending of ik_llama.cpp's interleaved types; None without one."""
    match = _INTERLEAVED.fullmatch(text.strip().upper())
    return None if match is None else match[1]
