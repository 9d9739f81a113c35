"""What a file type is: a recipe, which gives each kind of tensor its type."""

from __future__ import annotations

from dataclasses import dataclass

from gguf_tools.errors import BadRequest
from quantize.formats.codecs import CODECS, needs_importances, requires_importances
from quantize.plan.architecture_rules import own_rules
from quantize.plan.rules import Rule, Situation
from quantize.roles import Program, Role

NEED_IMPORTANCES = frozenset(filter(needs_importances, CODECS))
"""Types that llama-quantize refuses to make without importances (except for token_embd and output)."""


@dataclass(frozen=True)
class Recipe:
    """A file type of a program's llama-quantize.

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

    def _reason(self, chosen: Rule, situation: Situation) -> str:
        return f"{self.name}: {situation.role.value} {chosen.phrases}".rstrip()
