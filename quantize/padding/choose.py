"""Which sizes to pad for the types that are asked for: a plan with and without each, and the better file.

Padding costs bytes, and the types that fit the padded rows may be smaller or larger than those that they
replace. Files of different sizes are compared as if one could be given the other's bytes. A type's error
falls by a factor of 4 with each bit of a weight: over all types, the logarithm of the error is a
straight line of that slope. So of two plans the better one has the smaller sum of errors, times 4 to the
power of its bits per weight. It does not know which tensors matter more. `quantize --size` does, and compares
files by what was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gguf_tools.errors import BadArgument, BadRequest, PlanError
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import counted
from quantize.formats.codecs import codec_of
from quantize.padding import PadChoice
from quantize.padding.hidden_size import cost_text, hidden_padding, pads_hidden_size
from quantize.padding.padding import (
    NO_PADDING,
    Padding,
    is_padded,
    padding_of,
    paddings,
)
from quantize.plan.decide import TensorPlan, without_interleaving
from quantize.plan.plan import Plan

Decide = Callable[[Metadata, Sequence[TensorInfo]], tuple[Plan, Metadata]]
"""(metadata, tensors) -> the plan and the metadata of the file that they become."""


@dataclass(frozen=True)
class PaddedPlan:
    """Plan of a file with some of its sizes changed.

    plan, metadata  of the output
    padding         what changes about the input
    """

    plan: Plan
    metadata: Metadata
    padding: Padding = NO_PADDING


def decide_padded(
    metadata: Metadata,
    tensors: Sequence[TensorInfo],
    choice: PadChoice | None,
    decide: Decide,
    path: str,
    *,
    hidden: bool = False,
) -> PaddedPlan:
    """Decide the sizes of a file, its plan and its metadata.

    choice  for inner sizes; None: they stay as they are
    path    of the input, for messages
    hidden  pad the hidden size, too
    raises  what `decide` raises; BadRequest, unless the choice is auto, for a model whose sizes can't change
    """
    if not hidden:
        return _decide_inner(metadata, tensors, choice, decide, path)
    padding = hidden_padding(metadata, tensors, path)
    if not padding.is_needed:
        made = _decide_inner(metadata, tensors, choice, decide, path)
        return _noted(made, "the hidden size is a multiple of 256 already")
    padding.refuse(tensors, path)
    made = _decide_inner(padding.metadata(metadata), padding.infos(tensors), choice, decide, path)
    made = replace(made, padding=padding.then(made.padding))
    return _noted(made, cost_text(metadata, padding, path))


def refuse_overridden_sizes(padding: Padding, overrides: Iterable[tuple[str, Value]]) -> None:
    """Raise BadArgument where metadata set by hand would contradict sizes that change."""
    changed = {change.key for change in padding.changes if change.before != change.after}
    twice = next((key for key, _ in overrides if key in changed), None)
    if twice is not None:
        raise BadArgument(f"--override-kv {twice}: padding changes this key; leave one of both out")


def _decide_inner(
    metadata: Metadata, tensors: Sequence[TensorInfo], choice: PadChoice | None, decide: Decide, path: str
) -> PaddedPlan:
    """Decide the inner sizes of a file, its plan and its metadata; see `decide_padded`."""
    if choice == "off" and pads_hidden_size(metadata):
        raise BadRequest(
            f"{path}: its hidden size is padded, which scaled its norms; start from the file that it was made"
            " of"
        )
    if choice is None or (choice == "off" and not is_padded(metadata)):
        return PaddedPlan(*decide(metadata, tensors))
    try:
        ways = paddings(metadata, tensors, path)
    except BadRequest as error:
        if choice != "auto":
            raise
        planned = PaddedPlan(*decide(metadata, tensors))
        falls_back = any(tensor.fell_from is not None for tensor in planned.plan.tensors)
        return _noted(planned, f"no size is padded: {error}") if falls_back else planned

    def plan_of(way: Padding) -> PaddedPlan:
        way.refuse(tensors, path)
        return PaddedPlan(*decide(way.metadata(metadata), way.infos(tensors)), way)

    if choice == "off":
        return _noted(plan_of(ways[0]), f"padding is taken away: {ways[0]}")
    if choice != "auto":
        chosen = plan_of(ways[-1] if choice == "256" else padding_of(choice, metadata, tensors, path))
        found = [*_possible([ways[0]], plan_of), chosen]
    else:
        found = list(_possible(ways, plan_of)) or [plan_of(ways[0])]
        n_real = {info.name: info.n_elems for info in ways[0].infos(tensors)}
        chosen = min(found, key=lambda each: badness(each.plan, n_real))
    return _compared(chosen, found)


def _possible(ways: Iterable[Padding], planned: Callable[[Padding], PaddedPlan]) -> Iterator[PaddedPlan]:
    """Yield the plans that can be made."""
    for way in ways:
        with suppress(PlanError):
            yield planned(way)


def badness(plan: Plan, n_real: Mapping[str, int]) -> float:
    """Judge a plan: the logarithm of its error if it had no bits left over; less is better.

    n_real  weights of each tensor without padding, by its name in the input
    """
    error = sum(typical_error(each.target_type) * n_real[each.source_name] for each in plan.tensors)
    n_weights = sum(n_real[each.source_name] for each in plan.tensors)
    bits = 8 * sum(info.n_bytes for info in plan.infos) / max(n_weights, 1)
    return math.log(max(error, 1e-30)) + bits * math.log(4)


def typical_error(type_: GGMLType) -> float:
    """The squared error that a type makes of ordinary weights, over their squares; 0 for whole numbers."""
    codec = codec_of(without_interleaving(type_).name)
    return 0.0 if codec is None else codec.typical_error


# ---- what the user is told


def _noted(planned: PaddedPlan, *notes: str) -> PaddedPlan:
    return replace(planned, plan=replace(planned.plan, notes=(*planned.plan.notes, *notes)))


def _compared(chosen: PaddedPlan, found: Sequence[PaddedPlan]) -> PaddedPlan:
    """Say in the plan what padding does to it, beside the other plans that there are."""
    plain = next((each for each in found if not each.padding.pads), None)
    if not chosen.padding.pads:
        others = [each for each in found if each.padding.pads]
        notes = [f"{_what(each)} was tried and not chosen: {_difference(chosen, each)}" for each in others]
        return _noted(chosen, *notes)
    note = _what(chosen)
    if plain is not None:
        note += f": {_difference(plain, chosen)}"
        chosen = _with_reasons(chosen, plain.plan)
    return _noted(chosen, note)


def _what(planned: PaddedPlan) -> str:
    padded = [each for each in planned.padding.changes if each.pads]
    sizes = ", ".join(f"{each.key} {each.real_text} -> {each.after_text}" for each in padded)
    return f"padding with zeros ({sizes})"


def _difference(plain: PaddedPlan, padded: PaddedPlan) -> str:
    """Say what bytes and types are, with padding and without."""
    with_, without = padded.plan.total_bytes, plain.plan.total_bytes
    before = {each.name: each.target_type for each in plain.plan.tensors}
    moved = Counter(
        (each.target_type.name, before[each.name].name)
        for each in padded.plan.tensors
        if before[each.name] != each.target_type
    )
    types = "".join(
        f"; {counted(n, 'tensor')} {new} instead of {old}" for (new, old), n in moved.most_common()
    )
    share = f"{100 * (with_ / without - 1):+.2f} %"
    return f"{with_:,} bytes of tensors with it, {without:,} without ({share}){types}"


def _with_reasons(chosen: PaddedPlan, plain: Plan) -> PaddedPlan:
    """Say of each tensor whose size changes what it is and would be."""
    before = {each.name: each for each in plain.tensors}

    def told(tensor: TensorPlan) -> TensorPlan:
        old = before[tensor.name]
        if old.shape == tensor.shape:
            return tensor
        shape = " x ".join(map(str, old.shape))
        return replace(tensor, reason=f"{tensor.reason}; padded, {old.target_type} of {shape} without")

    return replace(chosen, plan=replace(chosen.plan, tensors=tuple(map(told, chosen.plan.tensors))))
