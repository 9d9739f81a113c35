"""Recipes: what a file type is, and the language in which its rules are written.

A rule names roles, a type and conditions. `recipes` has the tables of the file types. Where llama.cpp decides
differently for a few architectures, `OWN_RULES` has a row, which is tried before the rules of the file types
that it names. The rows are facts of llama.cpp, whose llama-quant.cpp asks for these architectures by name.
What only one architecture keeps from being quantized is a matter of names and so in quantize/roles.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gguf_tools.errors import BadRequest
from quantize.formats.codecs import CODECS, needs_importances, requires_importances
from quantize.plan.model_facts import ModelFacts
from quantize.roles import Program, Role


@dataclass(frozen=True)
class Situation:
    """Facts that a rule may know about a tensor.

    role             a tied `token_embd` counts as the output
    n_visited        tensors of its kind that the rules decide before this one, in file order
    position, total  place among its kind. For attention values: n_visited, and the number of such tensors.
                     For feed-forward matrices: n_visited (in a mixture of experts, the layer), and the
                     number of layers
    fits_default     whether a row is a whole number of blocks of the recipe's default type
    is_stacked       whether it holds several matrices (experts, MLA heads)
    n_cols           elements of a row
    layer            number of its layer, None outside the layers
    is_tied          whether it is the token embeddings, which serve as the output, too
    is_shared_expert whether it belongs to experts that see every token
    """

    role: Role
    facts: ModelFacts
    has_importances: bool
    n_visited: int
    position: int
    total: int
    fits_default: bool
    is_stacked: bool
    n_cols: int = 0
    layer: int | None = None
    is_tied: bool = False
    is_shared_expert: bool = False


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
MORE_BITS = Condition("in the first or last eighth, or every third between", _deserves_more_bits)
FEWER_BITS = Condition(
    "in two of every three between the first and last eighth", lambda s: not _deserves_more_bits(s)
)
FIRST_TWO = Condition("of first two", lambda s: s.position < 2)
FIRST_FOUR = Condition("of first four", lambda s: s.position < 4)
SHARED_BY_HEADS = Condition("shared by 4 or more heads", lambda s: s.facts.n_gqa >= 4)
SHARED_WIDELY = Condition(
    "shared by 4 or more heads or experts", lambda s: s.facts.n_gqa >= 4 or s.facts.n_experts >= 4
)
EIGHT_EXPERTS = Condition("of an 8-expert model", lambda s: s.facts.n_experts == 8)
NOT_EIGHT_EXPERTS = Condition("", lambda s: s.facts.n_experts != 8)
OF_70B = Condition("of a 70B model", lambda s: s.facts.is_70b)
WITH_IMPORTANCES = Condition("with importances", lambda s: s.has_importances)
WITHOUT_IMPORTANCES = Condition("without importances", lambda s: not s.has_importances)
ROW_DOES_NOT_FIT = Condition("whose rows the default type can't hold", lambda s: not s.fits_default)
STACKED = Condition("of several matrices", lambda s: s.is_stacked)

V_LIKE = (Role.ATTN_V, Role.ATTN_QKV, Role.ATTN_KV_B)
EVERY_ROLE = tuple(Role)


@dataclass(frozen=True)
class Rule:
    """Gives tensors of some roles `type` where all the conditions hold."""

    roles: tuple[Role, ...]
    type: str
    when: tuple[Condition, ...] = ()

    def applies(self, situation: Situation) -> bool:
        return situation.role in self.roles and all(c.holds(situation) for c in self.when)

    @property
    def phrases(self) -> str:
        """The conditions in words, for the plan."""
        return " ".join(condition.phrase for condition in self.when if condition.phrase)


def rule(roles: Role | tuple[Role, ...], type_: str, *when: Condition) -> Rule:
    """Return a rule for one role or several, under all conditions `when`."""
    return Rule(roles if isinstance(roles, tuple) else (roles,), type_, when)


_CHOICE = "llama_tensor_get_type_impl"


@dataclass(frozen=True)
class OwnRule:
    """A rule for one architecture.

    recipes  names of the file types that it is for; empty: every one that quantizes
    source   the place in llama-quant.cpp
    """

    architecture: str
    recipes: tuple[str, ...]
    rule: Rule
    source: str


_NOT_FEED_FORWARD = tuple(
    role for role in EVERY_ROLE if role not in (Role.FFN_UP, Role.FFN_GATE, Role.FFN_DOWN)
)

OWN_RULES: tuple[OwnRule, ...] = (
    OwnRule("falcon", (), rule(Role.OUTPUT, "Q8_0"), _CHOICE),
    OwnRule("falcon", ("Q3_K_M",), rule(Role.FFN_DOWN, "Q5_K", FIRST_16TH), _CHOICE),
    OwnRule("falcon", ("Q3_K_M",), rule(Role.FFN_DOWN, "Q3_K", FEWER_BITS), _CHOICE),
    OwnRule("falcon", ("Q3_K_L",), rule(Role.FFN_DOWN, "Q4_K"), _CHOICE),
    OwnRule("falcon", ("Q4_K_S",), rule(Role.FFN_DOWN, "Q4_K"), _CHOICE),
    OwnRule("falcon", ("Q4_K_M",), rule(Role.FFN_DOWN, "Q6_K", FIRST_16TH), _CHOICE),
    OwnRule("falcon", ("Q4_K_M",), rule(Role.FFN_DOWN, "Q5_K", MORE_BITS), _CHOICE),
    OwnRule("falcon", ("Q4_K_M",), rule(Role.FFN_DOWN, "Q4_K"), _CHOICE),
    OwnRule("falcon", ("Q2_K",), rule(Role.ATTN_OUTPUT, "Q2_K"), _CHOICE),
    OwnRule("falcon", ("Q3_K_M",), rule(Role.ATTN_OUTPUT, "Q3_K"), _CHOICE),
    OwnRule("falcon", ("Q3_K_L",), rule(Role.ATTN_OUTPUT, "Q4_K"), _CHOICE),
    OwnRule("falcon", ("IQ3_XXS",), rule(Role.ATTN_OUTPUT, "IQ3_XXS"), _CHOICE),
    OwnRule("falcon", ("IQ3_M",), rule(Role.ATTN_OUTPUT, "IQ3_S"), _CHOICE),
    OwnRule("bailingmoe3", ("MXFP4_MOE",), rule(_NOT_FEED_FORWARD, "Q8_0"), _CHOICE),
    OwnRule("glm5-next", (), rule((Role.QUERY_LATENT, Role.NEXTN_PROJ), "Q8_0"), "LLM_ARCH_GLM5_NEXT"),
)


def own_rules(architecture: str, recipe: str) -> Iterator[OwnRule]:
    """Yield an architecture's own rules under a file type; the first that applies wins."""
    for row in OWN_RULES:
        if row.architecture == architecture and (not row.recipes or recipe in row.recipes):
            yield row


NEED_IMPORTANCES = frozenset(filter(needs_importances, CODECS))
"""Types that llama-quantize refuses to make without importances (except for token_embd and output)."""


@dataclass(frozen=True)
class Recipe:
    """A file type of a program's llama-quantize.

    name              as the program has it
    file_type         the number stored as `general.file_type`; None keeps the input's
    default           type of tensors that no rule claims; None keeps every tensor as it is
    rules             the first that applies wins
    need_importances  target types that are refused without importances
    program           whose file type it is; its reading of tensor names and its fallbacks go with it
    """

    name: str
    file_type: int | None
    default: str | None
    rules: tuple[Rule, ...] = ()
    need_importances: frozenset[str] = NEED_IMPORTANCES
    program: Program = "llama.cpp"

    def choose(self, situation: Situation) -> tuple[str, str]:
        """Return (name of a type, reason) for a tensor that may be quantized.

        raises  BadRequest for COPY, which chooses no type
        """
        if self.default is None:
            raise BadRequest(f"{self.name}: copies every tensor and chooses no type")
        architecture = situation.facts.architecture
        for own in own_rules(architecture, self.name) if self.program == "llama.cpp" else ():
            if own.rule.applies(situation):
                return own.rule.type, f"{self._reason(own.rule, situation)} ({architecture})"
        for rule_ in self.rules:
            if rule_.applies(situation):
                return rule_.type, self._reason(rule_, situation)
        return self.default, f"{self.name}: default"

    def refuses_without_importances(self, role: Role, type_: str) -> bool:
        """Return whether a tensor of a role that has no importances can't have a type."""
        if role in (Role.TOKEN_EMBD, Role.OUTPUT):
            return requires_importances(type_)
        return type_ in self.need_importances

    @property
    def always_needs_importances(self) -> bool:
        """Whether even an ordinary model can't be made without importances.

        The default type is not all: IQ3_XS gives attn_q and attn_k a type that needs them.
        """
        plain = ModelFacts("llama", n_layers=32, n_heads=32, n_kv_heads=32)
        middle = [Situation(role, plain, False, 16, 16, 32, True, False) for role in EVERY_ROLE]
        return self.default is not None and any(
            self.refuses_without_importances(each.role, self.choose(each)[0]) for each in middle
        )

    def _reason(self, chosen: Rule, situation: Situation) -> str:
        return f"{self.name}: {situation.role.value} {chosen.phrases}".rstrip()
