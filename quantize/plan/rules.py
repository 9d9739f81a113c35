"""The language of the tables: rules, and the conditions under which they hold.

A rule names roles, a type and conditions. `recipes` has the tables of the file types, `own_rules` what
llama.cpp does differently for a few architectures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
MORE_BITS = Condition("in first or last eighth or a third between", _deserves_more_bits)
FEWER_BITS = Condition("between, two of three", lambda s: not _deserves_more_bits(s))
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
