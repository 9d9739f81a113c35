"""What llama.cpp decides differently for a few architectures.

A row is tried before the rules of the file types that it names. The rows are facts of llama.cpp, whose
llama-quant.cpp asks for these architectures by name. What only one architecture keeps from being quantized is
a matter of names and so in quantize/roles.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantize.plan.rules import EVERY_ROLE, FEWER_BITS, FIRST_16TH, MORE_BITS, Rule, rule
from quantize.roles import Role

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
