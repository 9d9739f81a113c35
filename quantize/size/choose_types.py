"""Types chosen for a size: the mixture with the least predicted divergence, under the rules of a user.

`Sensitivities` have what each tensor costs at each type, and `budget` finds the best selection. Here the
rules decide which types a tensor may have, and tensors that must have equal types become one item.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from gguf_tools.errors import BadOverride, BadRequest
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.header import align_up
from gguf_tools.text import size_text
from quantize.formats.codecs import CODECS, Machine
from quantize.plan.overrides import Override, find_override
from quantize.plan.recipe_files import LACKED_BY
from quantize.plan.sensitivities import Sensitivities
from quantize.roles import Program
from quantize.size.budget import BudgetChoice, BudgetTooSmall, Item, Selection, select

Target = Program

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_\w+_exps\.weight")

SLOW: Mapping[Machine, frozenset[str]] = {
    machine: frozenset(name for name, codec in CODECS.items() if machine in codec.slow_on)
    for machine in get_args(Machine)
}
"""Types that are slow where a model runs."""


@dataclass(frozen=True)
class TypeRules:
    """Which types may be chosen.

    target         the program that is to run the file
    fast_on        leave out types that are slow there
    equal_experts  the stacks of a layer's experts get one type
    fixed          REGEX=TYPE: these tensors have this type; the first that matches wins
    at_least       REGEX=TYPE: no type of fewer bits per weight than this one; the first that matches wins
    at_most        REGEX=TYPE: no type of more bits
    unweighed      tensors that have no importances, and the types that they can't have without
    """

    target: Target = "llama.cpp"
    fast_on: frozenset[Machine] = frozenset()
    equal_experts: bool = False
    fixed: tuple[Override, ...] = ()
    at_least: tuple[Override, ...] = ()
    at_most: tuple[Override, ...] = ()
    unweighed: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def allowed(self, name: str, measured: Iterable[str]) -> list[str]:
        """Return which of the types that were measured for a tensor it may have.

        raises  BadRequest when none is left, or a fixed type was not measured
        """
        measured = list(measured)
        fixed = find_override(self.fixed, name)
        if fixed is not None:
            if fixed.type.name not in measured:
                raise BadRequest(
                    f"{name}: {fixed.text} asks for {fixed.type}, and the losses have {', '.join(measured)}"
                )
            return [fixed.type.name]
        refused = LACKED_BY[self.target].union(*(SLOW[machine] for machine in self.fast_on))
        refused |= self.unweighed.get(name, frozenset())
        least, most = find_override(self.at_least, name), find_override(self.at_most, name)
        left = [
            type_
            for type_ in measured
            if type_ in CODECS
            and type_ not in refused
            and (least is None or by_name(type_).bits_per_weight >= least.type.bits_per_weight)
            and (most is None or by_name(type_).bits_per_weight <= most.type.bits_per_weight)
        ]
        if not left:
            raise BadRequest(f"{name}: the rules leave none of the types {', '.join(measured)}")
        return left


@dataclass(frozen=True)
class ChosenType:
    """The type of one tensor, and why.

    n_bytes   of the tensor
    sensitivity    predicted, nats per token
    next_up   the next larger type that was possible and not worth its bytes; None at the top
    saves     sensitivity that each further byte would have saved there; below the selection's price
    """

    name: str
    type: str
    n_bytes: int
    sensitivity: float
    next_up: str | None
    saves: float


@dataclass(frozen=True)
class ChosenTypes:
    """The types of all tensors that have sensitivities.

    predicted  divergence of the file, nats per token
    price      sensitivity that one more byte would save, about
    gap        the best possible choice is predicted to be at most this much better
    """

    tensors: Mapping[str, ChosenType]
    predicted: float
    price: float
    gap: float

    @property
    def types(self) -> dict[str, str]:
        """Tensor name -> type name."""
        return {name: chosen.type for name, chosen in self.tensors.items()}

    @property
    def n_bytes(self) -> int:
        return sum(chosen.n_bytes for chosen in self.tensors.values())


@dataclass(frozen=True)
class Share:
    """Some of the tensors, and the bytes that they may take together.

    besides  bytes of them that go to what can't be chosen
    """

    belongs: Callable[[str], bool]
    n_bytes: int
    what: str = "the tensors"
    besides: int = 0


def is_expert_stack(name: str) -> bool:
    """Return whether a tensor holds the routed experts of a layer, which stay in memory beside a GPU."""
    return _EXPERTS.fullmatch(name) is not None


def choose_types(
    sensitivities: Sensitivities,
    shares: Sequence[Share],
    rules: TypeRules | None = None,
    *,
    calibrated: bool = False,
    alignment: int = 32,
) -> ChosenTypes:
    """Return the types with the least predicted divergence.

    shares      budgets of the tensors that have sensitivities; each tensor counts for the first it belongs to
    calibrated  the file will be encoded with calibration
    alignment   what the bytes of each tensor are rounded up to in the file
    raises      BadRequest for a budget that is too small, and for rules that leave a tensor no type;
                BadOverride for a type that --tensor-type fixes for no tensor
    """
    rules = rules or TypeRules()
    for rule in rules.fixed:
        if rule.must_match and not any(map(rule.matches, sensitivities.tensors)):
            raise BadOverride(f"--tensor-type {rule.mistake(sensitivities.tensors)}")
    groups = _groups(sensitivities, rules)
    tensors: dict[str, ChosenType] = {}
    predicted = gap = price = 0.0
    left = dict(groups)
    for share in shares:
        mine = {key: names for key, names in left.items() if share.belongs(names[0])}
        left = {key: names for key, names in left.items() if key not in mine}
        items = [
            _item(key, names, sensitivities, rules, calibrated=calibrated, alignment=alignment)
            for key, names in mine.items()
        ]
        try:
            selection = select(items, share.n_bytes - share.besides)
        except BudgetTooSmall as error:
            least = error.least + share.besides
            raise BadRequest(
                f"{share.what}: a size of {share.n_bytes:,} bytes is too small: the smallest possible is"
                f" {least:,} bytes ({size_text(least)}). Choose a larger size, or allow types of fewer bits"
            ) from error
        predicted, gap = predicted + selection.sensitivity, gap + selection.gap
        price = max(price, selection.price)
        tensors.update(_explained(items, selection, mine, sensitivities, calibrated=calibrated))
    return ChosenTypes(
        {name: tensors[name] for name in sensitivities.tensors if name in tensors}, predicted, price, gap
    )


def _groups(sensitivities: Sensitivities, rules: TypeRules) -> dict[str, list[str]]:
    """Return the tensors that get one type together, by a key."""
    groups: dict[str, list[str]] = {}
    for name in sensitivities.tensors:
        expert = _EXPERTS.fullmatch(name)
        key = f"experts of layer {expert[1]}" if expert and rules.equal_experts else name
        groups.setdefault(key, []).append(name)
    return groups


def _item(
    key: str,
    names: Sequence[str],
    sensitivities: Sensitivities,
    rules: TypeRules,
    *,
    calibrated: bool,
    alignment: int,
) -> Item:
    """Return the choices of tensors that get one type together."""
    allowed = [rules.allowed(name, sensitivities.tensors[name].by_type) for name in names]
    common = [type_ for type_ in allowed[0] if all(type_ in types for types in allowed)]
    if not common:
        raise BadRequest(f"{key}: the rules leave no type that all of {', '.join(names)} can have")
    return Item(
        key,
        tuple(
            BudgetChoice(
                type_,
                sum(
                    align_up(by_name(type_).tensor_bytes(sensitivities.tensors[name].shape), alignment)
                    for name in names
                ),
                sum(_sensitivity(sensitivities, name, type_, calibrated) for name in names),
            )
            for type_ in common
        ),
    )


def _sensitivity(sensitivities: Sensitivities, name: str, type_: str, calibrated: bool) -> float:
    each = sensitivities.tensors[name]
    return each.by_type[type_] * (each.ratio if calibrated else 1.0)


def _explained(
    items: Sequence[Item],
    selection: Selection,
    groups: Mapping[str, Sequence[str]],
    sensitivities: Sensitivities,
    *,
    calibrated: bool,
) -> dict[str, ChosenType]:
    """Return each tensor's type, and the best larger one that was not worth its bytes."""
    explained: dict[str, ChosenType] = {}
    for item, choice in zip(items, selection.choices, strict=True):
        step = _best_step_up(item, choice)
        for name in groups[item.name]:
            explained[name] = ChosenType(
                name=name,
                type=choice.name,
                n_bytes=by_name(choice.name).tensor_bytes(sensitivities.tensors[name].shape),
                sensitivity=_sensitivity(sensitivities, name, choice.name, calibrated),
                next_up=None if step is None else step[0],
                saves=0.0 if step is None else step[1],
            )
    return explained


def _best_step_up(item: Item, choice: BudgetChoice) -> tuple[str, float] | None:
    """Return the larger choice that saves most per byte, and what it saves; None where none saves."""
    steps = [
        ((choice.sensitivity - other.sensitivity) / (other.n_bytes - choice.n_bytes), other.name)
        for other in item.choices
        if other.n_bytes > choice.n_bytes and other.sensitivity < choice.sensitivity
    ]
    if not steps:
        return None
    saves, name = max(steps)
    return name, saves
