"""The recipes of the file types that ik_llama.cpp has and llama.cpp lacks.

The tables are facts of ik_llama.cpp 8337e4c (src/llama-quantize.cpp: llama_tensor_get_type,
llama_model_quantize_internal). What it decides differently for Falcon is left out, and so are its file types
of BitNet and MXFP4, which have types that we can't encode. A file type that llama.cpp has too (IQ2_XXS,
Q4_K_M ...) is llama.cpp's here.
"""

from __future__ import annotations

from quantize.plan.model_facts import ModelFacts
from quantize.plan.recipe import (
    FIRST_8TH,
    FIRST_8TH_VISITED,
    FIRST_FOUR,
    MORE_BITS,
    NEED_IMPORTANCES,
    OF_70B,
    SHARED_BY_HEADS,
    SHARED_WIDELY,
    WITH_IMPORTANCES,
    WITHOUT_IMPORTANCES,
    Condition,
    Recipe,
    Rule,
    rule,
)
from quantize.roles import Role

_LARGE_VOCABULARY = 127999
"""Least number of tokens for which llama_tensor_get_type calls a vocabulary large."""

_LAYERS_OF_8B = {"llama": (32, 36), "qwen3": (36,), "qwen3vl": (36,), "cohere2": (32,), "mistral3": (34,)}
"""Layers of the models that ik_llama.cpp takes for one of 8 billion weights (llama-hparams.cpp: MODEL_8B)."""

_WIDTH_OF_4B = 2560
"""Width of the Qwen3 models that have the layers of one of 8 billion weights, and are smaller."""


def _is_8b_or_70b_of_many_tokens(facts: ModelFacts) -> bool:
    layers = _LAYERS_OF_8B.get(facts.architecture, ())
    is_8b = facts.n_layers in layers and facts.width != _WIDTH_OF_4B and facts.n_experts != 8
    return facts.n_vocab >= _LARGE_VOCABULARY and (is_8b or facts.is_70b)


_BROKEN_ROWS = Condition("whose rows are no multiple of 256", lambda s: bool(s.n_cols % 256))
_TIED = Condition("tied to the embeddings", lambda s: s.is_tied)
_MANY_TOKENS = Condition(
    "of an 8B or 70B model with many tokens", lambda s: _is_8b_or_70b_of_many_tokens(s.facts)
)
_TWO_EXPERTS = Condition("of a model with 2 or more experts", lambda s: s.facts.n_experts >= 2)
_FOUR_EXPERTS = Condition("of a model with 4 or more experts", lambda s: s.facts.n_experts >= 4)
_EIGHT_EXPERTS = Condition("of a model with 8 or more experts", lambda s: s.facts.n_experts >= 8)
_BY_TWO_HEADS = Condition("shared by 2 or more heads", lambda s: s.facts.n_gqa >= 2)
_FIRST_LAYER = Condition("of the first layer", lambda s: s.layer == 0)
_SHARED_EXPERT = Condition("of a shared expert", lambda s: s.is_shared_expert)

_V, _K, _DOWN, _ATTN_OUTPUT, _QKV = (
    Role.ATTN_V,
    Role.ATTN_K,
    Role.FFN_DOWN,
    Role.ATTN_OUTPUT,
    Role.ATTN_QKV,
)
_Q = (Role.ATTN_Q, Role.ATTN_QKV)
_GATE_UP = (Role.FFN_GATE, Role.FFN_UP)
_FEED_FORWARD = (Role.FFN_DOWN, *_GATE_UP)


def _output(type_: str = "Q6_K", tied: str | None = None) -> tuple[Rule, ...]:
    """Return the rules of the output matrix; `tied` is its type where it is the embeddings, too."""
    first = rule(Role.OUTPUT, "Q8_0", _BROKEN_ROWS)
    last = rule(Role.OUTPUT, type_)
    return (first, last) if tied is None else (first, rule(Role.OUTPUT, tied, _TIED), last)


_OUTPUT_OF_FEW_BITS = _output("Q5_K", "IQ4_K")
_OUTPUT_OF_FOUR_BITS = _output("Q6_K", "IQ5_K")
_OUTPUT_OF_EXPERTS = rule(_ATTN_OUTPUT, "Q5_K", _FOUR_EXPERTS)
_EARLY_DOWN = rule(_DOWN, "Q5_K", FIRST_8TH, WITHOUT_IMPORTANCES)


def _with_care(
    embeddings: tuple[Rule, ...], *, v: tuple[str, str, str], attention: str, first: str, shared: str,
    qkv: str, down: str, output: tuple[str, str],
) -> tuple[Rule, ...]:  # fmt: skip
    """Return the rules of the types that treat attention, the first layer and shared experts with care.

    v       types of attn_v by how widely it is shared, most first
    output  types of attn_output with experts and without
    """
    return (
        *embeddings,
        rule(_V, v[0], SHARED_WIDELY),
        rule(_V, v[1], _BY_TWO_HEADS),
        rule(_V, v[2]),
        rule(_K, attention, _EIGHT_EXPERTS),
        rule(_FEED_FORWARD, first, _EIGHT_EXPERTS, _FIRST_LAYER),
        rule(_Q, attention, _EIGHT_EXPERTS),
        rule(_QKV, qkv),
        rule(_FEED_FORWARD, shared, _SHARED_EXPERT),
        rule(_DOWN, down, FIRST_8TH),
        rule(_ATTN_OUTPUT, output[0], _FOUR_EXPERTS),
        rule(_ATTN_OUTPUT, output[1]),
    )


_ONE_BIT = _with_care(
    (*_OUTPUT_OF_FEW_BITS, rule(Role.TOKEN_EMBD, "Q2_K")),
    v=("IQ4_K_R4", "IQ3_K_R4", "Q2_K_R4"),
    attention="Q4_K_R4",
    first="IQ3_K_R4",
    shared="IQ4_K_R4",
    qkv="IQ2_K_R4",
    down="Q2_K_R4",
    output=("Q5_K_R4", "IQ2_K_R4"),
)


def _two_bits(start: tuple[Rule, ...], small: str, qkv: str, attn_output: str | None) -> tuple[Rule, ...]:
    """Return the rules of the 2-bit types; `small` is the type of attn_v that is not shared."""
    kept = () if attn_output is None else (rule(_ATTN_OUTPUT, attn_output),)
    return (
        *start,
        rule(_V, "IQ4_K", SHARED_WIDELY),
        rule(_V, "IQ3_K", _BY_TWO_HEADS),
        rule(_V, "IQ3_K", _TWO_EXPERTS),
        rule(_V, small),
        rule(_K, "Q4_K", _EIGHT_EXPERTS),
        rule(_Q, "Q4_K", _EIGHT_EXPERTS),
        rule(_QKV, qkv),
        rule(_DOWN, small, FIRST_8TH_VISITED),
        _OUTPUT_OF_EXPERTS,
        *kept,
    )


_TWO_BITS_R4 = _two_bits(
    (*_output("Q5_K_R4", "IQ4_K_R4"), rule(Role.TOKEN_EMBD, "Q2_K")), "Q2_K", "IQ2_K", None
)
_MORE_V = rule(_V, "IQ5_K", _BY_TWO_HEADS)


def _ik(name: str, file_type: int, *rules: Rule, default: str | None = None) -> Recipe:
    """Return a recipe; `default` is the type of the same name unless another is given."""
    low = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S")
    needs = NEED_IMPORTANCES - {"IQ3_XXS"} | {*low, *(f"{type_}_R4" for type_ in low), "IQ1_KT", "IQ2_KT"}
    return Recipe(name, file_type, default or name, rules, needs, program="ik_llama.cpp")


def _usual(
    name: str, file_type: int, start: tuple[Rule, ...], *rules: Rule, default: str | None = None
) -> Recipe:
    """Return a recipe as `_ik` does, of most file types: they give small matrices of attention more bits.

    start  rules before those of attention; `rules` are behind them
    """
    type_ = default or name
    attention = (
        rule(_V, "Q8_0", _FOUR_EXPERTS),
        rule(_V, "IQ5_K" if type_ == "IQ3_K" else type_, OF_70B),
        rule(_K, "Q8_0", _FOUR_EXPERTS),
    )
    return _ik(name, file_type, *start, *attention, *rules, default=default)


_ALL: tuple[Recipe, ...] = (
    _usual("Q6_0", 135, _output()),
    _usual("Q8_KV", 149, _output("Q8_KV")),
    _usual("IQ1_KT", 156, _OUTPUT_OF_FEW_BITS),
    _ik(
        "IQ2_KT",
        151,
        *_with_care(
            _OUTPUT_OF_FEW_BITS,
            v=("IQ4_K", "IQ3_K", "Q2_K"),
            attention="Q4_K",
            first="IQ3_K",
            shared="IQ4_K",
            qkv="IQ3_K",
            down="IQ3_K",
            output=("Q5_K", "IQ3_K"),
        ),
    ),
    _usual(
        "IQ3_KT",
        152,
        (*_OUTPUT_OF_FEW_BITS, rule(Role.TOKEN_EMBD, "IQ3_S")),
        rule(_V, "IQ4_K", SHARED_BY_HEADS),
        rule(_V, "IQ3_K"),
        rule(_DOWN, "IQ4_K", FIRST_8TH, WITHOUT_IMPORTANCES),
        rule(_DOWN, "IQ3_K", WITHOUT_IMPORTANCES),
        _OUTPUT_OF_EXPERTS,
        rule(_ATTN_OUTPUT, "IQ3_K", SHARED_BY_HEADS),
    ),
    _usual("IQ4_KT", 153, _output(), rule(_V, "IQ5_K", SHARED_BY_HEADS), rule(_V, "IQ4_K")),
    _ik("IQ2_KS", 147, *_two_bits(_OUTPUT_OF_FEW_BITS, "Q2_K", "IQ2_K", None)),
    _usual(
        "IQ2_K",
        138,
        _OUTPUT_OF_FEW_BITS,
        rule(_V, "IQ4_K", _BY_TWO_HEADS),
        rule(_V, "IQ3_K"),
        _OUTPUT_OF_EXPERTS,
        rule(_ATTN_OUTPUT, "IQ3_K"),
    ),
    _usual(
        "IQ2_KL",
        155,
        _OUTPUT_OF_FEW_BITS,
        rule(_V, "IQ4_KS", _BY_TWO_HEADS),
        rule(_ATTN_OUTPUT, "IQ4_KS", _FOUR_EXPERTS),
    ),
    _usual("IQ3_KS", 154, _OUTPUT_OF_FEW_BITS, rule(_V, "IQ4_KS", _BY_TWO_HEADS), _OUTPUT_OF_EXPERTS),
    _usual("IQ3_K", 139, _OUTPUT_OF_FEW_BITS, rule(_V, "IQ4_K", _BY_TWO_HEADS), _OUTPUT_OF_EXPERTS),
    _usual(
        "IQ3_KL",
        146,
        _OUTPUT_OF_FOUR_BITS,
        _MORE_V,
        rule(_V, "IQ4_K"),
        rule(_FEED_FORWARD, "IQ4_KS", MORE_BITS),
        _OUTPUT_OF_EXPERTS,
        rule(_ATTN_OUTPUT, "IQ4_KS"),
        default="IQ3_K",
    ),
    _usual("IQ4_KSS", 148, _OUTPUT_OF_FOUR_BITS, _MORE_V, _EARLY_DOWN, _OUTPUT_OF_EXPERTS),
    _usual("IQ4_KS", 145, _OUTPUT_OF_FOUR_BITS, _MORE_V, _EARLY_DOWN, _OUTPUT_OF_EXPERTS),
    _usual("IQ4_K", 140, _output(), _MORE_V, _OUTPUT_OF_EXPERTS),
    _usual(
        "IQ5_KS",
        150,
        _output(),
        rule(_V, "IQ6_K", _MANY_TOKENS),
        rule(_Q, "IQ4_KS", _MANY_TOKENS),
        _OUTPUT_OF_EXPERTS,
    ),
    _usual("IQ5_K", 141, _output(), rule(_V, "IQ6_K", _MANY_TOKENS), rule(_Q, "IQ4_K", _MANY_TOKENS)),
    _usual("IQ6_K", 142, _output("IQ6_K")),
    # ---- interleaved
    _usual("Q4_0_R8", 202, _output(), rule(_DOWN, "IQ4_NL_R4", WITH_IMPORTANCES, FIRST_8TH)),
    _usual("Q5_0_R4", 208, _output()),
    _usual("Q6_0_R4", 335, _output()),
    _usual("Q8_0_R8", 207, _output("Q8_0_R8")),
    _usual(
        "Q2_K_R4",
        210,
        _output(),
        rule(_V, "Q4_K_R4", SHARED_BY_HEADS),
        rule(_DOWN, "Q4_K_R4", FIRST_8TH),
        _OUTPUT_OF_EXPERTS,
    ),
    _usual("Q3_K_R4", 211, _output(), rule(_V, "Q4_K_R4", SHARED_BY_HEADS), _OUTPUT_OF_EXPERTS),
    _usual(
        "Q4_K_R4",
        214,
        _output(),
        rule(_V, "Q5_K", FIRST_FOUR),
        rule(_DOWN, "Q5_K", FIRST_8TH),
        _OUTPUT_OF_EXPERTS,
    ),
    _usual("Q5_K_R4", 216, _output()),
    _usual("Q6_K_R4", 218, _output("Q6_K_R4")),
    _usual("Q8_K_R8", 399, _output("Q8_K_R8")),
    _usual("Q8_KV_R8", 398, _output("Q8_KV_R8")),
    _ik("IQ1_S_R4", 224, *_ONE_BIT),
    _ik("IQ1_M_R4", 231, *_ONE_BIT),
    _ik("IQ2_XXS_R4", 219, *_TWO_BITS_R4),
    _ik("IQ2_XS_R4", 220, *_TWO_BITS_R4),
    _ik(
        "IQ2_M_R4",
        229,
        *_two_bits((*_OUTPUT_OF_FEW_BITS, rule(Role.TOKEN_EMBD, "IQ3_S")), "IQ3_S", "IQ3_XXS", "IQ3_S"),
        default="IQ2_S_R4",
    ),
    _usual(
        "IQ3_XXS_R4",
        223,
        (*_OUTPUT_OF_FEW_BITS, rule(Role.TOKEN_EMBD, "IQ3_K")),
        rule(_V, "Q4_K_R4", SHARED_BY_HEADS),
        rule(_V, "IQ3_K_R4", _BY_TWO_HEADS),
        rule(_V, "IQ3_K_R4", WITHOUT_IMPORTANCES),
        rule((_K, *_Q), "IQ2_S"),
        rule(_DOWN, "Q4_K_R4", FIRST_8TH, WITHOUT_IMPORTANCES),
        rule(_DOWN, "IQ3_K_R4", WITHOUT_IMPORTANCES),
        _OUTPUT_OF_EXPERTS,
        rule(_ATTN_OUTPUT, "IQ3_K_R4"),
    ),
    _usual("IQ3_S_R4", 226, _OUTPUT_OF_FOUR_BITS, rule(_V, "IQ4_K_R4", _BY_TWO_HEADS), _OUTPUT_OF_EXPERTS),
    _usual("IQ4_NL_R4", 225, _output(), _MORE_V, _EARLY_DOWN, _OUTPUT_OF_EXPERTS),
    _usual("IQ4_XS_R8", 230, _output(), _MORE_V, _EARLY_DOWN, _OUTPUT_OF_EXPERTS),
    _usual(
        "IQ2_K_R4",
        338,
        _OUTPUT_OF_FEW_BITS,
        rule(_V, "IQ4_K_R4", _BY_TWO_HEADS),
        rule(_V, "IQ3_K_R4"),
        _OUTPUT_OF_EXPERTS,
        rule(_ATTN_OUTPUT, "IQ3_K_R4"),
    ),
    _usual("IQ3_K_R4", 339, _OUTPUT_OF_FEW_BITS, rule(_V, "IQ4_K_R4", _BY_TWO_HEADS), _OUTPUT_OF_EXPERTS),
    _usual("IQ4_K_R4", 340, _output(), _MORE_V, _OUTPUT_OF_EXPERTS),
    _usual("IQ5_K_R4", 341, _output()),
    _usual(
        "IQ4_KS_R4",
        345,
        _OUTPUT_OF_FOUR_BITS,
        rule(_V, "IQ5_K_R4", _BY_TWO_HEADS),
        rule(_DOWN, "Q5_K_R4", FIRST_8TH, WITHOUT_IMPORTANCES),
        _OUTPUT_OF_EXPERTS,
    ),
    _usual("IQ5_KS_R4", 350, _output(), _OUTPUT_OF_EXPERTS),
    _ik("BF16_R16", 232),
)

IK_RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""The recipes by name."""
