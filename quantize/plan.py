"""The plan: which type every tensor gets, and why, before a single weight is read.

A plan depends on names, shapes, types, metadata and on which importances there are; it is data that can be
printed, compared and tested. `decide` chooses the types; here they meet the importances, and whatever a user
should know becomes a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gguf_tools.errors import BadRequest, NeedsImportance
from gguf_tools.ggml_types import GGMLType
from gguf_tools.tensors import TensorInfo
from quantize.decide import Candidate, Decider, Decision, PlanOptions, decide
from quantize.facts import ARCHITECTURES_WITH_OWN_RULES, ModelFacts
from quantize.importance import ONE_ROW_FOR_ALL, Importances, resolve
from quantize.overrides import overrides_without_effect
from quantize.pruning import Pruning
from quantize.recipes import Recipe
from quantize.roles import Role, file_order, sibling_with_same_activations, tensor_role

__all__ = ["Plan", "PlanOptions", "TensorPlan", "build_plan", "in_file_order"]

IMPOSSIBLE_WITHOUT_IMPORTANCES = frozenset({"IQ1_S", "IQ2_XXS", "IQ2_XS"})
"""Types that ggml can't make at all without importances (ggml_quantize_requires_imatrix)."""

IGNORE_IMPORTANCES = frozenset({"F32", "F16", "BF16", "Q8_0", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0"})
"""Types whose encoding looks at no importances."""

_NAMED_IN_A_NOTE = 3


@dataclass(frozen=True)
class TensorPlan:
    """What becomes of one tensor.

    name, shape   in the output, rows first
    source_name   in the input; another layer's number when layers are pruned
    reason        why this type, in a phrase
    importance    name of the data that weighs its columns, or None
    weighting     how that data came to this tensor, in a phrase; empty in the plain case
    n_neutral     how many of its matrices have seen nothing and get neutral weights
    fell_back     the type is another than was decided, because a row does not fit
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    source_name: str
    source_type: GGMLType
    target_type: GGMLType
    reason: str
    importance: str | None = None
    weighting: str = ""
    n_neutral: int = 0
    fell_back: bool = False

    @property
    def info(self) -> TensorInfo:
        """The tensor as it stands in the output file."""
        return TensorInfo(self.name, self.shape, self.target_type)

    @property
    def source_info(self) -> TensorInfo:
        """The tensor as it stands in the input."""
        return TensorInfo(self.source_name, self.shape, self.source_type)

    @property
    def is_copied(self) -> bool:
        return self.source_type == self.target_type


@dataclass(frozen=True)
class Plan:
    """The plan of a whole file.

    file_type   name of the recipe
    tensors     in the order of the output
    notes       what a user should know: overrides without effect, fallbacks, importances borrowed or missing
    needs_data  tensors whose type needs importances that are not there; a plan with some can't be run
    """

    file_type: str
    tensors: tuple[TensorPlan, ...]
    notes: tuple[str, ...] = ()
    needs_data: tuple[str, ...] = ()

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """The tensors of the output file."""
        return tuple(tensor.info for tensor in self.tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without header and padding."""
        return sum(info.n_bytes for info in self.infos)

    @property
    def bits_per_weight(self) -> float:
        n_elems = sum(info.n_elems for info in self.infos)
        return 8 * self.total_bytes / n_elems if n_elems else 0.0

    def to_json(self, total_bytes: int | None = None) -> dict[str, Any]:
        """Return the plan as plain data.

        total_bytes  size of the output file, once its layout is known; else the bytes of the tensors
        """
        return {
            "file_type": self.file_type,
            "tensors": [
                {
                    "name": tensor.name,
                    "shape": list(tensor.shape),
                    "from": tensor.source_type.name,
                    "to": tensor.target_type.name,
                    "reason": tensor.reason,
                    "importance": tensor.importance,
                }
                for tensor in self.tensors
            ],
            "notes": list(self.notes),
            "total_bytes": self.total_bytes if total_bytes is None else total_bytes,
        }


def in_file_order(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Return `tensors` in the order in which llama-quantize writes them (without --keep-split)."""
    by_name = {tensor.name: tensor for tensor in tensors}
    return [by_name[name] for name in file_order(by_name)]


def build_plan(
    tensors: Sequence[TensorInfo],
    recipe: Recipe,
    facts: ModelFacts,
    *,
    importances: Importances | None = None,
    options: PlanOptions | None = None,
    allow_missing_data: bool = False,
) -> Plan:
    """Return the plan for `tensors`, in their order, without those of pruned layers.

    importances         by tensor name, with the layer numbers of the input; None or empty: there are none
    allow_missing_data  return a plan that can't be run, with `needs_data` filled, as a dry run does
    raises  NoFallback       when rows fit no type, listing every such tensor
            NeedsImportance  when a type needs data that is not there, listing every such tensor
            BadImportance    when data does not fit its tensor
            BadRequest       when quantized tensors would be quantized again without leave
    """
    options = options or PlanOptions()
    kept = _kept_layers(tensors, options)
    candidates = tuple(
        Candidate(replace(source, name=name), tensor_role(name, source.shape)) for source, name in kept
    )
    decisions = decide(candidates, recipe, facts, bool(importances), options)
    plans = tuple(
        _tensor_plan(source, candidate, decision, importances or {}, facts.n_heads)
        for (source, _), candidate, decision in zip(kept, candidates, decisions, strict=True)
    )
    if not options.allow_requantize:
        _refuse_requantizing(plans)
    needs_data = tuple(plan.name for plan in plans if _lacks_data(plan, recipe))
    if needs_data and not allow_missing_data:
        raise NeedsImportance(_missing_data(plans, needs_data, bool(importances)))
    notes = (
        *_architecture_notes(facts),
        *_override_notes(candidates, decisions, recipe, options),
        *_fallback_notes(plans),
        *_importance_notes(tensors, plans, importances or {}),
    )
    return Plan(recipe.name, plans, notes, needs_data)


def _kept_layers(tensors: Sequence[TensorInfo], options: PlanOptions) -> tuple[tuple[TensorInfo, str], ...]:
    """Return (input tensor, name in the output) of all tensors whose layers stay."""
    if not options.prune_layers:
        return tuple((tensor, tensor.name) for tensor in tensors)
    pruning = Pruning.of([tensor.name for tensor in tensors], options.prune_layers)
    return tuple((t, name) for t in tensors if (name := pruning.new_name(t.name)) is not None)


def _tensor_plan(
    source: TensorInfo,
    candidate: Candidate,
    decision: Decision,
    importances: Importances,
    n_heads: int | None,
) -> TensorPlan:
    looks = decision.type != source.type and decision.type.name not in IGNORE_IMPORTANCES
    data = resolve(source, importances, n_heads) if looks else None
    return TensorPlan(
        name=candidate.name,
        shape=source.shape,
        role=candidate.role.role,
        source_name=source.name,
        source_type=source.type,
        target_type=decision.type,
        reason=decision.reason,
        importance=None if data is None else data.entry,
        weighting="" if data is None else data.reason,
        n_neutral=0 if data is None else data.n_neutral,
        fell_back=decision.fell_back,
    )


def _refuse_requantizing(plans: Sequence[TensorPlan]) -> None:
    again = [p for p in plans if p.source_type.is_quantized and not p.is_copied]
    if again:
        shown = _some([f"{p.name} ({p.source_type.name} -> {p.target_type.name})" for p in again])
        raise BadRequest(
            f"{len(again)} of {len(plans)} tensors are quantized already: {shown}; start from a file in"
            " F32, F16 or BF16, or pass --allow-requantize and lose quality"
        )


def _lacks_data(plan: TensorPlan, recipe: Recipe) -> bool:
    if plan.importance is not None or plan.is_copied:
        return False
    target = plan.target_type.name
    if plan.role in (Role.TOKEN_EMBD, Role.OUTPUT):
        return target in IMPOSSIBLE_WITHOUT_IMPORTANCES
    return target in recipe.need_importances


def _missing_data(plans: Sequence[TensorPlan], needs_data: Sequence[str], has_importances: bool) -> str:
    types = {plan.name: plan.target_type.name for plan in plans}
    tensors = ", ".join(f"{name} ({types[name]})" for name in needs_data)
    remedy = "it has no data for them" if has_importances else "pass one with --imatrix"
    return f"{len(needs_data)} of {len(plans)} tensors need an importance matrix, {remedy}: {tensors}"


def _architecture_notes(facts: ModelFacts) -> Iterable[str]:
    if facts.architecture in ARCHITECTURES_WITH_OWN_RULES:
        yield (
            f"llama-quantize has rules of its own for {facts.architecture}, which are not known here:"
            " some types may differ from its choice"
        )


def _override_notes(
    candidates: Sequence[Candidate], decisions: Sequence[Decision], recipe: Recipe, options: PlanOptions
) -> Iterable[str]:
    open_to = (Decider.OVERRIDE, Decider.PURE, Decider.RULES)
    names = [c.name for c, d in zip(candidates, decisions, strict=True) if d.decider in open_to]
    if options.overrides and not names:
        yield f"overrides have no effect under {recipe.name}"
        return
    yield from overrides_without_effect(options.overrides, names)


def _fallback_notes(plans: Sequence[TensorPlan]) -> Iterable[str]:
    names = [plan.name for plan in plans if plan.fell_back]
    yield from _note("another type, because rows do not fit", names, len(plans))


def _importance_notes(
    tensors: Sequence[TensorInfo], plans: Sequence[TensorPlan], importances: Importances
) -> Iterable[str]:
    if not importances:
        return
    weighed = [p for p in plans if not p.is_copied and p.target_type.name not in IGNORE_IMPORTANCES]
    without = [p.name for p in weighed if p.importance is None]
    borrowed = [f"{p.name} ({p.weighting})" for p in weighed if p.importance not in (None, p.source_name)]
    shared = [p.name for p in weighed if p.importance == p.source_name and p.weighting == ONE_ROW_FOR_ALL]
    neutral = [f"{p.name} (matrices: {p.n_neutral})" for p in weighed if p.n_neutral]
    known = {tensor.name for tensor in tensors}
    strange = [n for n in importances if n not in known and sibling_with_same_activations(n) not in known]
    yield from _note("no data in the importance matrix", without, len(weighed))
    yield from _note("another tensor's importances", borrowed, len(weighed))
    yield from _note("one row of importances for all matrices", shared, len(weighed))
    yield from _note("neutral importances, because nothing was routed to it", neutral, len(weighed))
    yield from _note("importances that belong to no tensor", strange, len(importances), "entries")


def _note(what: str, names: Sequence[str], total: int, unit: str = "tensors") -> Iterable[str]:
    if names:
        yield f"{what}: {len(names)} of {total} {unit}: {_some(names)}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED_IN_A_NOTE])
    return shown if len(names) <= _NAMED_IN_A_NOTE else f"{shown}, ..."
