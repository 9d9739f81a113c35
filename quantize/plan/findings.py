"""Findings: what a user should know of a plan before it is run, and what would stop the run.

Findings that stop a run carry the error it ends with; the others are notes. `quantize` prints them, and
`quantize lint` consists of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from math import prod

from gguf_tools.errors import BadImportance, BadOverride, BadRequest, NeedsImportance, QuantError
from gguf_tools.findings import Finding, Level
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.text import number_ranges
from quantize.formats import decodable, encodable
from quantize.importances.entries import ONE_ROW_FOR_ALL, Importances, PromisedImportance
from quantize.plan.decide import Decider, PlanOptions, TensorPlan
from quantize.plan.overrides import Override, find_override, idle_overrides, rules_for
from quantize.plan.recipe_files import LACKED_BY
from quantize.roles import Role, in_layer_ranges, layer_of, siblings_with_same_activations

_NAMED_IN_A_NOTE = 3

_NEVER_COLLECTED = frozenset({"output.weight", "token_embd.weight"})
"""Tensors that an importance matrix has no data for unless it was asked for: nobody need be warned."""


_WITHOUT_DATA = "Q4_K"
"""The type named for tensors without data."""


class Kind(StrEnum):
    """Subject of a finding; stable words for programs."""

    RULE_WITHOUT_EFFECT = "rule without effect"
    RULE_SHADOWED = "rule shadowed"
    FALLBACK = "fallback"
    PADDING = "padding"
    NO_DATA = "no importances"
    BORROWED_DATA = "borrowed importances"
    SHARED_DATA = "shared importances"
    NEUTRAL_DATA = "neutral importances"
    STRAY_DATA = "importances of no tensor"
    UNFIT_DATA = "importances do not fit"
    MISSING_DATA = "importances needed"
    QUANTIZED_ALREADY = "quantized already"
    NO_CODEC = "no codec"
    REFUSED = "refused"
    NO_PROGRAM = "no program"
    PRUNED = "pruned layers"


def stop_at_errors(findings: Iterable[Finding]) -> None:
    """Raise the error of the first finding that stops a run."""
    for finding in findings:
        if finding.error is not None:
            raise finding.error(finding.text)


def find_all(
    plans: Sequence[TensorPlan],
    *,
    source: Sequence[TensorInfo],
    importances: Importances,
    options: PlanOptions,
    recipe_name: str,
    mtp_layers: range = range(0),
) -> tuple[Finding, ...]:
    """Return all that a plan shows, what stops a run first.

    source      the tensors of the input, those of pruned layers included
    mtp_layers  layers of the input for multi-token prediction
    """
    return (
        *(
            Finding.stopping(Kind.UNFIT_DATA, plan.unfit_data, BadImportance, (plan.name,))
            for plan in plans
            if plan.unfit_data
        ),
        *_quantized_already(plans, options),
        *_missing_data(plans, bool(importances), mtp_layers),
        *_no_program(plans),
        *_idle_rules(plans, options, recipe_name),
        *fallbacks(plans, options.fallbacks),
        *_uses_of_data(source, plans, importances),
    )


def without_codec(plans: Sequence[TensorPlan]) -> Iterator[Finding]:
    """Yield one finding when some tensors can't be decoded or encoded here, or not even copied row by row."""
    known = {"decoded": decodable(), "encoded": encodable()}
    found = {
        f"{tensor.name}: {type_.name} can't be {verb} yet ({_types_text(tensor)})": tensor.name
        for tensor in plans
        if not tensor.is_copied
        for type_, verb in ((tensor.source_type, "decoded"), (tensor.target_type, "encoded"))
        if type_.name not in known[verb]
    }
    found |= {
        f"{tensor.name}: {tensor.source_type.name} keeps {group} rows together, and {n_rows} rows are no"
        " multiple of that": tensor.name
        for tensor in plans
        for group, n_rows in ((tensor.source_type.rows_interleaved, prod(tensor.shape[-2:-1])),)
        if not tensor.is_copied and n_rows % group
    }
    found |= {
        f"{tensor.name}: {tensor.target_type.name} has bytes after its rows and can't be copied": tensor.name
        for tensor in plans
        if tensor.is_copied and tensor.target_type.tensor_meta_bytes
    }
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        text = f"{next(iter(found))}{more}"
        yield Finding.stopping(Kind.NO_CODEC, text, QuantError, tuple(found.values()))


# ---- what stops a run


def _quantized_already(plans: Sequence[TensorPlan], options: PlanOptions) -> Iterator[Finding]:
    again = [p for p in plans if p.counts_as.is_quantized and not p.stays]
    if again and not options.allow_requantize:
        shown = _first_few([f"{p.name} ({_types_text(p)})" for p in again])
        text = (
            f"{len(again)} of {len(plans)} tensors are quantized already: {shown}; start from a file in"
            " F32, F16 or BF16, or pass --allow-requantize and lose quality"
        )
        yield Finding.stopping(Kind.QUANTIZED_ALREADY, text, BadRequest, tuple(p.name for p in again))


def _missing_data(plans: Sequence[TensorPlan], has_importances: bool, mtp_layers: range) -> Iterator[Finding]:
    lacking = [plan for plan in plans if plan.lacks_data]
    if lacking:
        remedy = (
            "it has no data for them"
            if has_importances
            else "pass one with --imatrix (`imatrix` makes it of a text)"
        )
        by_type: dict[str, list[str]] = defaultdict(list)
        for plan in lacking:
            by_type[plan.target_type.name].append(plan.name)
        names = "; ".join(f"{type_}: {', '.join(in_layer_ranges(group))}" for type_, group in by_type.items())
        text = f"{len(lacking)} of {len(plans)} tensors need an importance matrix, {remedy}: {names}"
        if has_importances:
            text += _way_without_data(lacking, plans, mtp_layers)
        yield Finding.stopping(Kind.MISSING_DATA, text, NeedsImportance, tuple(p.name for p in lacking))


def _way_without_data(lacking: Sequence[TensorPlan], plans: Sequence[TensorPlan], mtp_layers: range) -> str:
    """Name the rules that give tensors a type for which the matrix need not know them, and what they are."""
    known = [plan.name for plan in plans if plan.entry is not None]
    if not known:
        return "; was the matrix made for another model?"
    found = {layer_of(plan.source_name) for plan in lacking}
    layers = [layer for layer in mtp_layers if layer in found]
    why = ""
    if layers:
        which = f"layer {layers[0]} is" if len(layers) == 1 else f"layers {number_ranges(layers)} are"
        why = f"; {which} for multi-token prediction (MTP), which few matrices cover"
    rules = rules_for([plan.name for plan in lacking], known, _WITHOUT_DATA)
    options = " ".join(f"--tensor-type '{rule}'" for rule in rules)
    first = " before other rules" if any(plan.decider is Decider.OVERRIDE for plan in lacking) else ""
    return f"{why}; a type that needs none: {options}{first}"


# ---- what is worth knowing


def _no_program(plans: Sequence[TensorPlan]) -> Iterator[Finding]:
    """Yield a finding when llama.cpp lacks the types of some tensors, and ik_llama.cpp those of others."""
    lacked: dict[str, dict[str, list[str]]] = {}
    for program, lacking in LACKED_BY.items():
        found = lacked.setdefault(program, {})
        for plan in plans:
            if plan.target_type.name in lacking:
                found.setdefault(plan.target_type.name, []).append(plan.name)
    if all(lacked.values()):
        only_ik, no_ik = lacked["llama.cpp"], lacked["ik_llama.cpp"]
        names = [name for group in no_ik.values() for name in group]
        what = (
            f"no program reads {', '.join(only_ik)} and {', '.join(no_ik)} in one file: llama.cpp lacks the"
            f" former, ik_llama.cpp the latter"
        )
        yield from _about(Kind.NO_PROGRAM, what, names, len(plans))


def _idle_rules(plans: Sequence[TensorPlan], options: PlanOptions, recipe_name: str) -> Iterator[Finding]:
    open_to = (Decider.OVERRIDE, Decider.PURE, Decider.RULES)
    open_names = [plan.name for plan in plans if plan.decider in open_to]
    names = [plan.name for plan in plans]
    mistakes = [each for each in options.overrides if each.must_match and not any(map(each.matches, names))]
    for each in mistakes:
        yield Finding.stopping(Kind.RULE_WITHOUT_EFFECT, f"--tensor-type {each.mistake(names)}", BadOverride)
    overrides = [each for each in options.overrides if each not in mistakes]
    if overrides and not open_names:
        yield Finding(Kind.RULE_WITHOUT_EFFECT, f"overrides have no effect under {recipe_name}")
    else:
        yield from _idle("override", overrides, "matches no tensor that can be quantized", open_names)
    fallen = [plan.name for plan in plans if plan.fell_from is not None]
    yield from _idle("fallback", options.fallbacks, "matches no tensor whose rows need one", fallen)


def _idle(what: str, rules: Sequence[Override], missed: str, names: Sequence[str]) -> Iterator[Finding]:
    for idle in idle_overrides(rules, names):
        rule = f"{what} '{idle.override.text}'"
        if not idle.names:
            yield Finding(Kind.RULE_WITHOUT_EFFECT, f"{rule} {missed}")
        else:
            others = ", ".join(f"'{other.text}'" for other in idle.shadowed_by)
            shown = _first_few(in_layer_ranges(idle.names))
            text = f"{rule} is shadowed by {others}, which came first: {shown}"
            yield Finding(Kind.RULE_SHADOWED, text, about=idle.names)


def fallbacks(plans: Sequence[TensorPlan], named: Sequence[Override] | None = None) -> Iterator[Finding]:
    """Yield one finding per way in which rows did not fit.

    It is a mere note where the user has named the type, and where rows are shorter than one block: then no
    file of that model can be otherwise, as with attn_k_b of DeepSeek.

    named  the user's fallbacks; None where nobody can name any
    """
    ways: dict[tuple[str, str, Level], list[str]] = defaultdict(list)
    hidden_size = next((plan.shape[-1] for plan in plans if plan.name == "token_embd.weight"), None)
    for plan in plans:
        wanted = plan.fell_from
        if wanted is None:
            continue
        if plan.shape[-1] % wanted.block_elems:
            why = f"rows of {plan.shape[-1]} can't be cut into blocks of {wanted.block_elems}"
        else:
            why = f"{plan.shape[-2]} rows can't be cut into groups of {wanted.rows_interleaved}"
        what = f"{plan.target_type} instead of {wanted}, because {why}"
        is_named = find_override(named or (), plan.name) is not None
        is_expected = is_named or plan.shape[-1] < wanted.block_elems
        remedy = "" if is_named or named is None else _way_out(plan, hidden_size)
        ways[what, remedy, Level.NOTE if is_expected else Level.WARNING].append(plan.name)
    for (what, remedy, level), names in ways.items():
        for finding in _about(Kind.FALLBACK, what, names, len(plans), level):
            yield replace(finding, text=finding.text + remedy)


def _way_out(plan: TensorPlan, hidden_size: int | None) -> str:
    """Name what lets rows fit, or else the option that chooses what they become."""
    wanted = plan.fell_from
    if wanted is not None and plan.shape[-1] % wanted.block_elems and plan.shape[-1] > wanted.block_elems:
        if plan.role is Role.FFN_DOWN:
            return "; whole blocks with --pad, another type with --fallback"
        if plan.shape[-1] == hidden_size:
            return "; whole blocks with --pad-hidden, another type with --fallback"
    return "; another type with --fallback"


def _uses_of_data(
    source: Sequence[TensorInfo], plans: Sequence[TensorPlan], importances: Importances
) -> Iterator[Finding]:
    if not importances:
        return
    weighed = [p for p in plans if p.is_weighed]
    total = len(weighed)
    without = [p.name for p in weighed if p.entry is None and not p.lacks_data and not p.unfit_data]
    borrowed = {p.name: p.weighting for p in weighed if p.entry not in (None, p.source_name)}
    shared = [p.name for p in weighed if p.entry == p.source_name and p.weighting == ONE_ROW_FOR_ALL]
    neutral = {p.name: f"matrices: {p.n_neutral}" for p in weighed if p.n_neutral}
    known = {tensor.name for tensor in source}
    strange = [n for n in importances if known.isdisjoint((n, *siblings_with_same_activations(n)))]
    level = Level.NOTE if _NEVER_COLLECTED.issuperset(without) else Level.WARNING
    what = "no data in the importance matrix"
    if any(isinstance(entry, PromisedImportance) for entry in importances.values()):
        without = [name for name in without if name not in _NEVER_COLLECTED]  # calibration has its own data
        what = "calibration collects no importances"
    yield from _about(Kind.NO_DATA, what, without, total, level)
    yield from _about(Kind.BORROWED_DATA, "another tensor's importances", borrowed, total)
    yield from _about(Kind.SHARED_DATA, "one row of importances for all matrices", shared, total)
    yield from _about(
        Kind.NEUTRAL_DATA, "neutral importances, because nothing was routed to it", neutral, total
    )
    if strange:
        text = f"importances that belong to no tensor: {len(strange)} of {len(importances)} entries: "
        yield Finding(Kind.STRAY_DATA, text + _first_few(in_layer_ranges(strange)))


def _about(
    kind: Kind, what: str, found: Sequence[str] | dict[str, str], total: int, level: Level = Level.WARNING
) -> Iterator[Finding]:
    """Yield one finding about tensors, by their names or with a remark for each."""
    if found:
        remarks = found.items() if isinstance(found, dict) else ()
        shown = _first_few([f"{name} ({remark})" for name, remark in remarks] or in_layer_ranges(found))
        yield Finding(kind, f"{what}: {len(found)} of {total} tensors: {shown}", level, about=tuple(found))


def _first_few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED_IN_A_NOTE])
    return shown if len(names) <= _NAMED_IN_A_NOTE else f"{shown}, ..."


def _types_text(plan: TensorPlan) -> str:
    return f"{plan.source_type.name} -> {plan.target_type.name}"
