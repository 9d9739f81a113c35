"""The recipe of each file type: which type each kind of tensor gets.

A recipe is data: a default type and a list of rules, of which the first that applies wins. What llama.cpp
decides differently for some architectures (`own_rules`) comes before them. The tables are facts of
llama.cpp (llama-quant.cpp: llama_ftype_get_default_type, llama_tensor_get_type_impl). There they are one
ladder for all file types, here one list per file type. Plans recorded from llama-quantize test them.

Types have names of their own in other projects: here is what they mean there, and the nearest file type.
Sources: the model pages of Unsloth, bartowski and mradermacher, and the documentation of AutoAWQ, AutoGPTQ,
ExLlama, bitsandbytes, MLX and vLLM.
"""

from __future__ import annotations

import re

from gguf_tools.errors import BadArgument
from gguf_tools.text import did_you_mean, quoted
from quantize.plan.ik_recipes import IK_RECIPES
from quantize.plan.recipe import (
    EIGHT_EXPERTS,
    EVERY_ROLE,
    FIRST_8TH,
    FIRST_8TH_VISITED,
    FIRST_16TH,
    FIRST_FOUR,
    FIRST_TWO,
    MIDDLE,
    MORE_BITS,
    NEED_IMPORTANCES,
    NOT_EIGHT_EXPERTS,
    OF_70B,
    ROW_DOES_NOT_FIT,
    SHARED_BY_HEADS,
    SHARED_WIDELY,
    STACKED,
    V_LIKE,
    WITH_IMPORTANCES,
    WITHOUT_IMPORTANCES,
    Recipe,
    Rule,
    rule,
)
from quantize.roles import Role


def _output(type_: str) -> tuple[Rule, ...]:
    return (rule(Role.OUTPUT, "Q8_0", ROW_DOES_NOT_FIT), rule(Role.OUTPUT, type_))


_EIGHT = (rule(V_LIKE, "Q8_0", EIGHT_EXPERTS), rule(Role.ATTN_K, "Q8_0", EIGHT_EXPERTS))
_OUTPUT_EIGHT = rule(Role.ATTN_OUTPUT, "Q5_K", EIGHT_EXPERTS)
_V_70B = rule(V_LIKE, "Q5_K", OF_70B)
_V_70B_SHARED = rule(V_LIKE, "Q5_K", OF_70B, SHARED_BY_HEADS)


def _mixture(
    name: str,
    file_type: int,
    default: str,
    *rules: Rule,
    output: str = "Q6_K",
    need_importances: frozenset[str] = NEED_IMPORTANCES,
) -> Recipe:
    """Return a recipe of the common kind: more bits for the output matrix, Q8_0 for what 8 experts share."""
    return Recipe(name, file_type, default, (*_output(output), *_EIGHT, *rules), need_importances)


def _tiny(embeddings: str, v: str, early_down: str, attn_output: str | None) -> tuple[Rule, ...]:
    """Return the rules of the 1- and 2-bit recipes, which spend bits on the small tensors."""
    kept = () if attn_output is None else (rule(Role.ATTN_OUTPUT, attn_output),)
    return (
        *_output("Q5_K"),
        rule(Role.TOKEN_EMBD, embeddings),
        rule(V_LIKE, "Q4_K", SHARED_WIDELY),
        rule(V_LIKE, v),
        rule(Role.ATTN_K, "Q4_K", EIGHT_EXPERTS),
        rule(Role.FFN_DOWN, early_down, FIRST_8TH_VISITED),
        rule(Role.ATTN_OUTPUT, "Q5_K", EIGHT_EXPERTS),
        *kept,
    )


_ATTN_KEY_QUERY = (Role.ATTN_K, Role.ATTN_Q)
_TERNARY = (rule(Role.TOKEN_EMBD, "Q4_K"),)
_IQ4 = (
    rule(V_LIKE, "Q5_K", SHARED_BY_HEADS),
    rule(Role.FFN_DOWN, "Q5_K", FIRST_8TH, WITHOUT_IMPORTANCES),
    _OUTPUT_EIGHT,
)

_ALL: tuple[Recipe, ...] = (
    Recipe("F32", 0, "F32"),
    Recipe("F16", 1, "F16"),
    Recipe("BF16", 32, "BF16"),
    Recipe("COPY", None, None),
    Recipe("Q8_0", 7, "Q8_0", _EIGHT),
    _mixture("Q4_0", 2, "Q4_0", rule(Role.FFN_DOWN, "Q4_1", WITH_IMPORTANCES, FIRST_8TH)),
    _mixture("Q4_1", 3, "Q4_1"),
    _mixture("Q5_0", 8, "Q5_0", rule(Role.FFN_DOWN, "Q5_1", WITH_IMPORTANCES, FIRST_8TH)),
    _mixture("Q5_1", 9, "Q5_1"),
    _mixture("Q1_0", 40, "Q1_0"),
    _mixture("Q2_0", 41, "Q2_0", *_TERNARY),
    _mixture("TQ1_0", 36, "TQ1_0", *_TERNARY),
    _mixture("TQ2_0", 37, "TQ2_0", *_TERNARY),
    Recipe(
        "MXFP4_MOE",
        38,
        "MXFP4",
        (rule(Role.OUTPUT, "Q8_0"), rule(EVERY_ROLE, "MXFP4", STACKED), rule(EVERY_ROLE, "Q8_0")),
    ),
    _mixture(
        "Q2_K",
        10,
        "Q2_K",
        _V_70B,
        rule(V_LIKE, "Q4_K", SHARED_BY_HEADS),
        rule(V_LIKE, "Q3_K"),
        rule(Role.FFN_DOWN, "Q3_K"),
        _OUTPUT_EIGHT,
        rule(Role.ATTN_OUTPUT, "Q3_K"),
    ),
    _mixture(
        "Q2_K_S",
        21,
        "Q2_K",
        _V_70B_SHARED,
        rule(V_LIKE, "Q4_K", SHARED_BY_HEADS),
        rule(Role.FFN_DOWN, "Q4_K", FIRST_8TH),
        need_importances=NEED_IMPORTANCES | {"Q2_K"},
    ),
    _mixture("Q3_K_S", 11, "Q3_K", _V_70B, _OUTPUT_EIGHT),
    _mixture(
        "Q3_K_M",
        12,
        "Q3_K",
        _V_70B,
        rule(V_LIKE, "Q5_K", FIRST_TWO),
        rule(V_LIKE, "Q4_K"),
        rule(Role.FFN_DOWN, "Q5_K", FIRST_16TH),
        rule(Role.FFN_DOWN, "Q4_K"),
        _OUTPUT_EIGHT,
        rule(Role.ATTN_OUTPUT, "Q4_K"),
    ),
    _mixture(
        "Q3_K_L",
        13,
        "Q3_K",
        rule(V_LIKE, "Q5_K"),
        rule(Role.FFN_DOWN, "Q5_K"),
        rule(Role.ATTN_OUTPUT, "Q5_K", NOT_EIGHT_EXPERTS),
    ),
    _mixture(
        "Q4_K_S",
        14,
        "Q4_K",
        _V_70B,
        rule(V_LIKE, "Q5_K", FIRST_FOUR),
        rule(Role.FFN_DOWN, "Q5_K", FIRST_8TH),
        _OUTPUT_EIGHT,
    ),
    _mixture(
        "Q4_K_M",
        15,
        "Q4_K",
        rule(V_LIKE, "Q6_K", MORE_BITS),
        _V_70B,
        rule(Role.FFN_DOWN, "Q6_K", MORE_BITS),
        _OUTPUT_EIGHT,
    ),
    _mixture("Q5_K_S", 16, "Q5_K"),
    _mixture("Q5_K_M", 17, "Q5_K", rule(V_LIKE, "Q6_K", MORE_BITS), rule(Role.FFN_DOWN, "Q6_K", MORE_BITS)),
    _mixture("Q6_K", 18, "Q6_K"),
    Recipe("IQ1_S", 24, "IQ1_S", _tiny("Q2_K", "Q2_K", "Q2_K", "IQ2_XXS")),
    Recipe("IQ1_M", 31, "IQ1_M", _tiny("Q2_K", "Q2_K", "Q2_K", "IQ2_XXS")),
    Recipe("IQ2_XXS", 19, "IQ2_XXS", _tiny("Q2_K", "Q2_K", "Q2_K", None)),
    Recipe("IQ2_XS", 20, "IQ2_XS", _tiny("Q2_K", "Q2_K", "Q2_K", None)),
    Recipe("IQ2_S", 28, "IQ2_XS", _tiny("IQ3_S", "IQ3_S", "IQ3_S", "IQ3_S")),
    Recipe("IQ2_M", 29, "IQ2_S", _tiny("IQ3_S", "IQ3_S", "IQ3_S", "IQ3_S")),
    _mixture(
        "IQ3_XXS",
        23,
        "IQ3_XXS",
        rule(Role.TOKEN_EMBD, "IQ3_S"),
        _V_70B_SHARED,
        rule(V_LIKE, "Q4_K", SHARED_BY_HEADS),
        rule(V_LIKE, "IQ3_S", WITHOUT_IMPORTANCES),
        rule(_ATTN_KEY_QUERY, "IQ2_S"),
        rule(Role.FFN_DOWN, "Q4_K", FIRST_8TH, WITHOUT_IMPORTANCES),
        rule(Role.FFN_DOWN, "Q3_K", WITHOUT_IMPORTANCES),
        _OUTPUT_EIGHT,
        rule(Role.ATTN_OUTPUT, "IQ3_S"),
        output="Q5_K",
    ),
    _mixture(
        "IQ3_XS",
        22,
        "IQ3_S",
        _V_70B_SHARED,
        rule(V_LIKE, "Q4_K", SHARED_BY_HEADS),
        rule(_ATTN_KEY_QUERY, "IQ3_XXS"),
        _OUTPUT_EIGHT,
        rule((Role.FFN_GATE, Role.FFN_UP), "IQ3_XXS", MIDDLE),
    ),
    _mixture("IQ3_S", 26, "IQ3_S", _V_70B_SHARED, rule(V_LIKE, "Q4_K", SHARED_BY_HEADS), _OUTPUT_EIGHT),
    _mixture(
        "IQ3_M",
        27,
        "IQ3_S",
        _V_70B,
        rule(V_LIKE, "Q4_K"),
        rule(Role.FFN_DOWN, "Q4_K", FIRST_8TH),
        rule(Role.FFN_DOWN, "Q4_K", EIGHT_EXPERTS, MORE_BITS),
        _OUTPUT_EIGHT,
        rule(Role.ATTN_OUTPUT, "Q4_K"),
    ),
    _mixture("IQ4_NL", 25, "IQ4_NL", *_IQ4),
    _mixture("IQ4_XS", 30, "IQ4_XS", *_IQ4),
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
_BY_NAME = RECIPES | IK_RECIPES
_BY_NUMBER = {str(r.file_type): r for r in _BY_NAME.values() if r.file_type is not None}
_WITHOUT_RECIPE = {"NVFP4": 39}
"""File types that only the converter makes (llama.h: LLAMA_FTYPE_MOSTLY_NVFP4)."""
ALIASES: dict[str, str] = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
FILE_TYPES: tuple[str, ...] = (*RECIPES, *ALIASES, *IK_RECIPES)
"""All names that `find_recipe` takes."""


def find_recipe(text: str) -> Recipe:
    """Return the recipe that llama-quantize means by a name (in any case), an alias or a number.

    A name that both llama.cpp and ik_llama.cpp know is llama.cpp's.

    raises  BadArgument for an unknown file type, with the nearest names
    """
    name = text.upper()
    name = ALIASES.get(name, name)
    if name in _BY_NAME:
        return _BY_NAME[name]
    if text in _BY_NUMBER:
        return _BY_NUMBER[text]
    raise BadArgument(unknown_file_type(text))


def file_type_of(type_name: str) -> int:
    """Return the number of the file type that is named after a ggml type; that of F32 where there is none."""
    recipe = _BY_NAME.get(ALIASES.get(type_name, type_name))
    return recipe.file_type or 0 if recipe is not None else _WITHOUT_RECIPE.get(type_name, 0)


def unknown_file_type(text: str) -> str:
    """Describe the mistake in a name that is no file type, with the nearest names."""
    foreign, base = foreign_type(text), interleaved_base(text)
    if foreign is not None and foreign[1] in FILE_TYPES:
        return f"unknown file type {quoted(text)}: {foreign[0]}; the nearest here is {foreign[1]}"
    if base in FILE_TYPES:
        return f"unknown file type {quoted(text)}: make {base}, and interleave it with gguf-tools repack"
    hint = did_you_mean(text, FILE_TYPES) or "; quantize --help lists them all"
    return f"unknown file type {quoted(text)}{hint}"


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
