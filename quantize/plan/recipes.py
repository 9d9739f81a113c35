"""The recipe of each file type: which type each kind of tensor gets.

A recipe is data: a default type and a list of rules, of which the first that applies wins. A rule names
roles, a type and the conditions that must hold. The tables are facts of llama.cpp (llama-quant.cpp:
llama_ftype_get_default_type, llama_tensor_get_type_impl). There they are one ladder for all file types, here
one list per file type. Plans recorded from llama-quantize test them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gguf_tools.errors import BadRequest
from quantize.formats.codecs import CODECS, requires_importances
from quantize.plan.model_facts import ModelFacts
from quantize.roles import Role


@dataclass(frozen=True)
class Situation:
    """What a rule may know about a tensor.

    role             a tied `token_embd` counts as the output
    n_visited        tensors of its kind that the rules decide before this one, in file order
    position, total  place among its kind. For attention values: n_visited, and the number of such tensors.
                     For feed-forward matrices: n_visited (in a mixture of experts, the layer), and the
                     number of layers
    fits_default     whether a row is a whole number of blocks of the recipe's default type
    is_stacked       whether it holds several matrices (experts, MLA heads)
    """

    role: Role
    facts: ModelFacts
    has_importances: bool
    n_visited: int
    position: int
    total: int
    fits_default: bool
    is_stacked: bool


@dataclass(frozen=True)
class Condition:
    """A test of a situation, and the phrase for it in the plan."""

    phrase: str
    holds: Callable[[Situation], bool]


def _deserves_more_bits(s: Situation) -> bool:
    edge = s.total // 8
    return s.position < edge or s.position >= 7 * s.total // 8 or (s.position - edge) % 3 == 2


FIRST_16TH = Condition("in first sixteenth", lambda s: s.position < s.total // 16)
FIRST_8TH = Condition("in first eighth", lambda s: s.position < s.total // 8)
FIRST_8TH_VISITED = Condition("among first visited", lambda s: s.n_visited < s.total // 8)
MIDDLE = Condition("between first and last eighth", lambda s: s.total // 8 <= s.position < 7 * s.total // 8)
MORE_BITS = Condition("in first or last eighth or a third between", _deserves_more_bits)
FIRST_TWO = Condition("of first two", lambda s: s.position < 2)
FIRST_FOUR = Condition("of first four", lambda s: s.position < 4)
SHARED_BY_HEADS = Condition("shared by 4 or more heads", lambda s: s.facts.n_gqa >= 4)
SHARED_WIDELY = Condition(
    "shared by 4 or more heads or experts", lambda s: s.facts.n_gqa >= 4 or s.facts.n_experts >= 4
)
EIGHT_EXPERTS = Condition("of an 8-expert model", lambda s: s.facts.n_experts == 8)
NOT_EIGHT_EXPERTS = Condition("", lambda s: s.facts.n_experts != 8)
LLAMA_70B = Condition("of Llama 70B", lambda s: s.facts.is_llama_70b)
WITH_IMPORTANCES = Condition("with importances", lambda s: s.has_importances)
WITHOUT_IMPORTANCES = Condition("without importances", lambda s: not s.has_importances)
ROW_DOES_NOT_FIT = Condition("whose rows the default type can't hold", lambda s: not s.fits_default)
STACKED = Condition("of several matrices", lambda s: s.is_stacked)

V_LIKE = (Role.ATTN_V, Role.ATTN_QKV, Role.ATTN_KV_B)
EVERY_ROLE = tuple(Role)

NEED_IMPORTANCES = frozenset(filter(requires_importances, CODECS)) | {"IQ1_M", "IQ2_S", "IQ3_XXS"}
"""Types that llama-quantize refuses to make without importances (except for token_embd and output)."""


@dataclass(frozen=True)
class Rule:
    """Gives tensors of some roles `type` where all the conditions hold."""

    roles: tuple[Role, ...]
    type: str
    when: tuple[Condition, ...] = ()

    def applies(self, situation: Situation) -> bool:
        return situation.role in self.roles and all(c.holds(situation) for c in self.when)


def _rule(roles: Role | tuple[Role, ...], type_: str, *when: Condition) -> Rule:
    return Rule(roles if isinstance(roles, tuple) else (roles,), type_, when)


@dataclass(frozen=True)
class Recipe:
    """A file type of llama-quantize.

    file_type         the number stored as `general.file_type`; None keeps the input's
    default           type of tensors that no rule claims; None keeps every tensor as it is
    rules             the first that applies wins
    need_importances  target types that are refused without importances
    """

    name: str
    file_type: int | None
    default: str | None
    rules: tuple[Rule, ...] = ()
    need_importances: frozenset[str] = NEED_IMPORTANCES

    def choose(self, situation: Situation) -> tuple[str, str]:
        """Return (name of a type, reason) for a tensor that may be quantized.

        raises  BadRequest for COPY, which chooses no type
        """
        if self.default is None:
            raise BadRequest(f"{self.name}: copies every tensor and chooses no type")
        for rule in self.rules:
            if rule.applies(situation):
                phrases = " ".join(c.phrase for c in rule.when if c.phrase)
                return rule.type, f"{self.name}: {situation.role.value} {phrases}".rstrip()
        return self.default, f"{self.name}: default"


def _output(type_: str) -> tuple[Rule, ...]:
    return (_rule(Role.OUTPUT, "Q8_0", ROW_DOES_NOT_FIT), _rule(Role.OUTPUT, type_))


_EIGHT = (_rule(V_LIKE, "Q8_0", EIGHT_EXPERTS), _rule(Role.ATTN_K, "Q8_0", EIGHT_EXPERTS))
_OUTPUT_EIGHT = _rule(Role.ATTN_OUTPUT, "Q5_K", EIGHT_EXPERTS)
_V_70B = _rule(V_LIKE, "Q5_K", LLAMA_70B)


def _common(*rules: Rule, output: str = "Q6_K") -> tuple[Rule, ...]:
    """Return the rules of most recipes: more bits for the output matrix, Q8_0 for what 8 experts share."""
    return (*_output(output), *_EIGHT, *rules)


def _tiny(embeddings: str, v: str, early_down: str, attn_output: str | None) -> tuple[Rule, ...]:
    """Return the rules of the 1- and 2-bit recipes, which spend bits on the small tensors."""
    kept = () if attn_output is None else (_rule(Role.ATTN_OUTPUT, attn_output),)
    return (
        *_output("Q5_K"),
        _rule(Role.TOKEN_EMBD, embeddings),
        _rule(V_LIKE, "Q4_K", SHARED_WIDELY),
        _rule(V_LIKE, v),
        _rule(Role.ATTN_K, "Q4_K", EIGHT_EXPERTS),
        _rule(Role.FFN_DOWN, early_down, FIRST_8TH_VISITED),
        _rule(Role.ATTN_OUTPUT, "Q5_K", EIGHT_EXPERTS),
        *kept,
    )


_ATTN_KEY_QUERY = (Role.ATTN_K, Role.ATTN_Q)
_TERNARY = _common(_rule(Role.TOKEN_EMBD, "Q4_K"))
_IQ4 = _common(
    _rule(V_LIKE, "Q5_K", SHARED_BY_HEADS),
    _rule(Role.FFN_DOWN, "Q5_K", FIRST_8TH, WITHOUT_IMPORTANCES),
    _OUTPUT_EIGHT,
)

_ALL: tuple[Recipe, ...] = (
    Recipe("F32", 0, "F32"),
    Recipe("F16", 1, "F16"),
    Recipe("BF16", 32, "BF16"),
    Recipe("COPY", None, None),
    Recipe("Q8_0", 7, "Q8_0", _EIGHT),
    Recipe("Q4_0", 2, "Q4_0", _common(_rule(Role.FFN_DOWN, "Q4_1", WITH_IMPORTANCES, FIRST_8TH))),
    Recipe("Q4_1", 3, "Q4_1", _common()),
    Recipe("Q5_0", 8, "Q5_0", _common(_rule(Role.FFN_DOWN, "Q5_1", WITH_IMPORTANCES, FIRST_8TH))),
    Recipe("Q5_1", 9, "Q5_1", _common()),
    Recipe("Q1_0", 40, "Q1_0", _common()),
    Recipe("Q2_0", 41, "Q2_0", _TERNARY),
    Recipe("TQ1_0", 36, "TQ1_0", _TERNARY),
    Recipe("TQ2_0", 37, "TQ2_0", _TERNARY),
    Recipe(
        "MXFP4_MOE",
        38,
        "MXFP4",
        (_rule(Role.OUTPUT, "Q8_0"), _rule(EVERY_ROLE, "MXFP4", STACKED), _rule(EVERY_ROLE, "Q8_0")),
    ),
    Recipe(
        "Q2_K",
        10,
        "Q2_K",
        _common(
            _V_70B,
            _rule(V_LIKE, "Q4_K", SHARED_BY_HEADS),
            _rule(V_LIKE, "Q3_K"),
            _rule(Role.FFN_DOWN, "Q3_K"),
            _OUTPUT_EIGHT,
            _rule(Role.ATTN_OUTPUT, "Q3_K"),
        ),
    ),
    Recipe(
        "Q2_K_S",
        21,
        "Q2_K",
        _common(
            _V_70B,
            _rule(V_LIKE, "Q4_K", SHARED_BY_HEADS),
            _rule(Role.FFN_DOWN, "Q4_K", FIRST_8TH),
        ),
        need_importances=NEED_IMPORTANCES | {"Q2_K"},
    ),
    Recipe("Q3_K_S", 11, "Q3_K", _common(_V_70B, _OUTPUT_EIGHT)),
    Recipe(
        "Q3_K_M",
        12,
        "Q3_K",
        _common(
            _V_70B,
            _rule(V_LIKE, "Q5_K", FIRST_TWO),
            _rule(V_LIKE, "Q4_K"),
            _rule(Role.FFN_DOWN, "Q5_K", FIRST_16TH),
            _rule(Role.FFN_DOWN, "Q4_K"),
            _OUTPUT_EIGHT,
            _rule(Role.ATTN_OUTPUT, "Q4_K"),
        ),
    ),
    Recipe(
        "Q3_K_L",
        13,
        "Q3_K",
        _common(
            _rule(V_LIKE, "Q5_K"),
            _rule(Role.FFN_DOWN, "Q5_K"),
            _rule(Role.ATTN_OUTPUT, "Q5_K", NOT_EIGHT_EXPERTS),
        ),
    ),
    Recipe(
        "Q4_K_S",
        14,
        "Q4_K",
        _common(
            _V_70B,
            _rule(V_LIKE, "Q5_K", FIRST_FOUR),
            _rule(Role.FFN_DOWN, "Q5_K", FIRST_8TH),
            _OUTPUT_EIGHT,
        ),
    ),
    Recipe(
        "Q4_K_M",
        15,
        "Q4_K",
        _common(
            _rule(V_LIKE, "Q6_K", MORE_BITS),
            _V_70B,
            _rule(Role.FFN_DOWN, "Q6_K", MORE_BITS),
            _OUTPUT_EIGHT,
        ),
    ),
    Recipe("Q5_K_S", 16, "Q5_K", _common()),
    Recipe(
        "Q5_K_M",
        17,
        "Q5_K",
        _common(_rule(V_LIKE, "Q6_K", MORE_BITS), _rule(Role.FFN_DOWN, "Q6_K", MORE_BITS)),
    ),
    Recipe("Q6_K", 18, "Q6_K", _common()),
    Recipe("IQ1_S", 24, "IQ1_S", _tiny("Q2_K", "Q2_K", "Q2_K", "IQ2_XXS")),
    Recipe("IQ1_M", 31, "IQ1_M", _tiny("Q2_K", "Q2_K", "Q2_K", "IQ2_XXS")),
    Recipe("IQ2_XXS", 19, "IQ2_XXS", _tiny("Q2_K", "Q2_K", "Q2_K", None)),
    Recipe("IQ2_XS", 20, "IQ2_XS", _tiny("Q2_K", "Q2_K", "Q2_K", None)),
    Recipe("IQ2_S", 28, "IQ2_XS", _tiny("IQ3_S", "IQ3_S", "IQ3_S", "IQ3_S")),
    Recipe("IQ2_M", 29, "IQ2_S", _tiny("IQ3_S", "IQ3_S", "IQ3_S", "IQ3_S")),
    Recipe(
        "IQ3_XXS",
        23,
        "IQ3_XXS",
        _common(
            _rule(Role.TOKEN_EMBD, "IQ3_S"),
            _V_70B,
            _rule(V_LIKE, "Q4_K", SHARED_BY_HEADS),
            _rule(V_LIKE, "IQ3_S", WITHOUT_IMPORTANCES),
            _rule(_ATTN_KEY_QUERY, "IQ2_S"),
            _rule(Role.FFN_DOWN, "Q4_K", FIRST_8TH, WITHOUT_IMPORTANCES),
            _rule(Role.FFN_DOWN, "Q3_K", WITHOUT_IMPORTANCES),
            _OUTPUT_EIGHT,
            _rule(Role.ATTN_OUTPUT, "IQ3_S"),
            output="Q5_K",
        ),
    ),
    Recipe(
        "IQ3_XS",
        22,
        "IQ3_S",
        _common(
            _V_70B,
            _rule(V_LIKE, "Q4_K", SHARED_BY_HEADS),
            _rule(_ATTN_KEY_QUERY, "IQ3_XXS"),
            _OUTPUT_EIGHT,
            _rule((Role.FFN_GATE, Role.FFN_UP), "IQ3_XXS", MIDDLE),
        ),
    ),
    Recipe("IQ3_S", 26, "IQ3_S", _common(_V_70B, _rule(V_LIKE, "Q4_K", SHARED_BY_HEADS), _OUTPUT_EIGHT)),
    Recipe(
        "IQ3_M",
        27,
        "IQ3_S",
        _common(
            _V_70B,
            _rule(V_LIKE, "Q4_K"),
            _rule(Role.FFN_DOWN, "Q4_K", FIRST_8TH),
            _rule(Role.FFN_DOWN, "Q4_K", EIGHT_EXPERTS, MORE_BITS),
            _OUTPUT_EIGHT,
            _rule(Role.ATTN_OUTPUT, "Q4_K"),
        ),
    ),
    Recipe("IQ4_NL", 25, "IQ4_NL", _IQ4),
    Recipe("IQ4_XS", 30, "IQ4_XS", _IQ4),
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
_BY_NUMBER = {str(recipe.file_type): recipe for recipe in _ALL if recipe.file_type is not None}
ALIASES: dict[str, str] = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def find_recipe(text: str) -> Recipe:
    """Return the recipe that llama-quantize means by a name (in any case), an alias or a number.

    raises  BadRequest for an unknown file type; lists the known ones
    """
    name = text.upper()
    name = ALIASES.get(name, name)
    if name in RECIPES:
        return RECIPES[name]
    if text in _BY_NUMBER:
        return _BY_NUMBER[text]
    raise BadRequest(f"{text!r}: unknown file type, expected one of {', '.join([*RECIPES, *ALIASES])}")
