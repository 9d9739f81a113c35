"""The plan: which type every tensor gets, and why, before a single weight is read.

A plan depends on names, shapes, types, metadata and on which importances there are; it is data that can be
printed, compared and tested. `decide` chooses the types; here they meet the importances, and whatever a user
should know becomes a finding.

Importances of a model whose layers are pruned are still looked up by the old names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gguf_tools.errors import BadImportance
from gguf_tools.findings import Finding, Level
from gguf_tools.format.ggml_types import I8, I16, I32, I64, GGMLType
from gguf_tools.format.shown import types_table
from gguf_tools.format.tensors import TensorInfo
from quantize.importances.entries import Importances, ResolvedImportance, resolve
from quantize.plan.decide import PlanOptions, TensorPlan, decide, draft
from quantize.plan.findings import find_all, stop_at_errors
from quantize.plan.model_facts import ModelFacts
from quantize.plan.recipe import Recipe
from quantize.roles import file_order, tensor_role

__all__ = ["Plan", "PlanOptions", "TensorPlan", "build_plan", "in_file_order"]


@dataclass(frozen=True)
class Plan:
    """The plan of a whole file.

    file_type  name of the recipe
    tensors    in the order of the output
    notes      other remarks, added by the front
    findings   what a user should know: rules without effect, fallbacks, importances borrowed or missing; a
               plan with one that stops can't be run
    weighed    the importances of each tensor that has an `entry`, fitted to its rows
    n_zeros    weights of the output that are padding and not the model's
    """

    file_type: str
    tensors: tuple[TensorPlan, ...]
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    weighed: Mapping[str, ResolvedImportance] = field(default_factory=dict, compare=False, repr=False)
    n_zeros: int = 0

    def __repr__(self) -> str:
        return f"<Plan {self.file_type}: {len(self.tensors)} tensors, {self.total_bytes:,} bytes>"

    def _repr_html_(self) -> str:
        return types_table(repr(self), self.infos)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes and the findings that do not stop a run."""
        return (*self.notes, *(finding.text for finding in self.findings if not finding.stops))

    @property
    def warnings(self) -> tuple[str, ...]:
        """The same without what is common and harmless, for the end of a run."""
        told = (each.text for each in self.findings if not each.stops and each.level > Level.NOTE)
        return (*self.notes, *told)

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that stop a run."""
        return tuple(finding for finding in self.findings if finding.stops)

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
        n_elems = sum(info.n_elems for info in self.infos) - self.n_zeros
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
                    "importance": tensor.entry,
                }
                for tensor in self.tensors
            ],
            "notes": list(self.remarks),
            "problems": [finding.text for finding in self.problems],
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
    allow_problems: bool = False,
    as_if: GGMLType | None = None,
) -> Plan:
    """Return the plan for `tensors`, in their order, without those of pruned layers.

    importances     by tensor name, with the layer numbers of the input; None or empty: there are none
    allow_problems  return even a plan that can't be run, as a dry run does; its findings say why
    as_if           decide as if every tensor of fractions were stored in this type; None: each in its own
    raises  NoFallback, BadOverride  when rows fit no type, listing every such tensor
            BadImportance            when data does not fit its tensor
            BadRequest               when quantized tensors would be quantized again without leave
            NeedsImportance          when a type needs data that is not there, listing every such tensor
    """
    options = options or PlanOptions()
    kept = _kept_layers(tensors, options)
    drafts = [
        draft(
            source,
            name,
            tensor_role(name, source.shape, facts.architecture, recipe.program).role,
            None if source.type in _WHOLE_NUMBERS else as_if,
        )
        for source, name in kept
    ]
    weighed: dict[str, ResolvedImportance] = {}
    plans = []
    decided = decide(drafts, recipe, facts, bool(importances), options)
    for (source, _), plan in zip(kept, decided, strict=True):
        data = None
        if plan.is_weighed:
            try:
                data = resolve(source, importances or {}, facts.n_heads)
            except BadImportance as error:
                plans.append(replace(plan, unfit_data=str(error)))
                continue
        if data is not None:
            weighed[plan.name] = data
            plan = replace(plan, entry=data.entry, weighting=data.reason, n_neutral=data.n_neutral)
        needs_data = not plan.stays and recipe.refuses_without_importances(plan.role, plan.target_type.name)
        plans.append(replace(plan, lacks_data=True) if data is None and needs_data else plan)
    findings = find_all(
        plans,
        source=tensors,
        importances=importances or {},
        options=options,
        recipe_name=recipe.name,
        mtp_layers=range(facts.n_layers - facts.n_mtp_layers, facts.n_layers),
    )
    if not allow_problems:
        stop_at_errors(findings)
    return Plan(recipe.name, tuple(plans), findings=findings, weighed=weighed)


_WHOLE_NUMBERS = frozenset({I8, I16, I32, I64})
"""Types of tables, which never count as anything else."""


def _kept_layers(tensors: Sequence[TensorInfo], options: PlanOptions) -> tuple[tuple[TensorInfo, str], ...]:
    """Return (input tensor, name in the output) of all tensors whose layers stay."""
    if not options.prune_layers:
        return tuple((tensor, tensor.name) for tensor in tensors)
    from quantize.plan.pruning import Pruning

    pruning = Pruning.of([tensor.name for tensor in tensors], options.prune_layers)
    return tuple((t, name) for t in tensors if (name := pruning.new_name(t.name)) is not None)
