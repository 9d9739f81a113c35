"""Which tensors of a file are regrouped, and as what.

Without orders it is ik_llama.cpp's choice (iqk_quantize.cpp: iqk_repacked_type): every type that has an
interleaved form but BF16, which only some of its builds can run interleaved. Embeddings stay, because their
rows are looked up one by one, and so do matrices whose rows fill no group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gguf_tools.argument_types import CheckedFields
from gguf_tools.errors import BadArgument, BadRequest
from gguf_tools.expressions import parse_expression
from gguf_tools.format.ggml_types import GGMLType, by_name
from gguf_tools.format.tensors import TensorInfo
from quantize.formats.codecs import REGROUPED
from quantize.roles import Role, in_layer_ranges, tensor_role

_NOT_BY_ITSELF = frozenset({"BF16_R16"})

_WITHOUT_BASE: Mapping[str, str] = {
    "IQ1_S_R4": "its rows have one scale each, and IQ1_S has one for every 256 weights",
    "IQ1_M_R4": "its rows have one scale each, and IQ1_M has one for every 256 weights",
    "Q8_K_R8": "its scales are float16, and Q8_K's are float32 and never in a file",
    "Q8_K_R16": "ik_llama.cpp makes it while loading, and never stores it",
    "IQ2_BN_R4": "BitNet's types are not known here",
    "MXFP4_R8": "ik_llama.cpp makes it while loading, and its layout is not known here",
}
"""Interleaved types that can't be taken apart -> why."""


@dataclass(frozen=True)
class RepackOptions(CheckedFields):
    """Options of a regrouping.

    to          interleaved types to make, by name, and no others; empty: ik_llama.cpp's choice
    undo        take interleaved rows apart instead
    only        expressions, of which one must match somewhere in a tensor's name; empty: all tensors
    keep_split  one output per part of the source
    """

    to: tuple[str, ...] = ()
    undo: bool = False
    only: tuple[str, ...] = ()
    keep_split: bool = False


@dataclass(frozen=True)
class Regrouping:
    """Regrouping of one tensor.

    info    as it is in the output
    origin  its type in the input
    """

    info: TensorInfo
    origin: GGMLType

    @property
    def is_regrouped(self) -> bool:
        return self.info.type != self.origin


@dataclass(frozen=True)
class Regroupings:
    """Regroupings of all tensors, in the order of the input, and why some stay that could be regrouped."""

    tensors: tuple[Regrouping, ...]
    notes: tuple[str, ...]


def plan_regroupings(tensors: Sequence[TensorInfo], options: RepackOptions) -> Regroupings:
    """Decide which of `tensors` are regrouped, and as what.

    raises  BadArgument  for a type in `to` that is not interleaved or no regrouping, and a wrong expression
            BadRequest   for a matrix whose rows can't be what `to` asks for, or what `undo` can't take apart
    """
    if options.to and options.undo:
        raise BadArgument(
            "--to and --undo can't be used together: one interleaves rows, one takes them apart"
        )
    patterns = [parse_expression(text, place="--only ", error=BadArgument) for text in options.only]
    chosen = [info for info in tensors if not patterns or any(p.matches(info.name) for p in patterns)]
    types = _taken_apart(chosen) if options.undo else _interleaved(chosen, _targets(options.to))
    notes = () if options.undo or options.to else tuple(_left(chosen, types))
    if options.only and not types:
        notes = (*notes, f"--only {' '.join(options.only)} matches no tensor that can be regrouped")
    return Regroupings(
        tuple(Regrouping(TensorInfo(t.name, t.shape, types.get(t.name, t.type)), t.type) for t in tensors),
        notes,
    )


def _targets(names: Sequence[str]) -> dict[str, GGMLType]:
    """Return base type -> interleaved type."""
    for name in names:
        if name.upper() in _WITHOUT_BASE:
            raise BadArgument(f"--to {name}: no type is {name} regrouped: {_WITHOUT_BASE[name.upper()]}")
        if name.upper() not in REGROUPED:
            raise BadArgument(
                f"--to {name}: not an interleaved type, expected some of {', '.join(REGROUPED)}"
            )
    wanted = [name.upper() for name in names] or [name for name in REGROUPED if name not in _NOT_BY_ITSELF]
    return {REGROUPED[name]: by_name(name) for name in wanted}


def _interleaved(tensors: Sequence[TensorInfo], targets: Mapping[str, GGMLType]) -> dict[str, GGMLType]:
    """Return name -> type of the tensors that are interleaved.

    raises  BadRequest for a matrix whose rows fill no group, where types are asked for by name
    """
    asked = len(targets) < len(REGROUPED) - len(_NOT_BY_ITSELF)
    types: dict[str, GGMLType] = {}
    unfit: list[TensorInfo] = []
    for info in tensors:
        target = targets.get(info.type.name)
        if target is None or not _may_be_interleaved(info):
            continue
        columns_fit = target.name != "BF16_R16" or info.n_cols % 2 == 0
        if columns_fit and _n_rows(info) % target.rows_interleaved == 0:
            types[info.name] = target
        elif asked:
            unfit.append(info)
    if unfit:
        first, more = unfit[0], f", and {len(unfit) - 1} more tensors" if len(unfit) > 1 else ""
        target = targets[first.type.name]
        raise BadRequest(
            f"{first.name}: {_n_rows(first)} rows are no multiple of {target.rows_interleaved}, which"
            f" {target} keeps together{more}; leave them out with --only"
        )
    return types


def _may_be_interleaved(info: TensorInfo) -> bool:
    return len(info.shape) > 1 and tensor_role(info.name, info.shape).role is not Role.TOKEN_EMBD


def _n_rows(info: TensorInfo) -> int:
    """Return the rows of one matrix."""
    return info.shape[-2]


def _taken_apart(tensors: Sequence[TensorInfo]) -> dict[str, GGMLType]:
    """Return name -> type of the tensors whose rows are taken apart.

    raises  BadRequest for interleaved rows of a type that no other type is without interleaving
    """
    for info in tensors:
        reason = _WITHOUT_BASE.get(info.type.name)
        if reason is not None:
            raise BadRequest(
                f"{info.name}: {info.type} can't be taken apart: {reason}; leave it out with --only, or"
                " quantize it again"
            )
    return {info.name: by_name(REGROUPED[info.type.name]) for info in tensors if info.type.name in REGROUPED}


def _left(tensors: Sequence[TensorInfo], types: Mapping[str, GGMLType]) -> list[str]:
    """Return a note for each reason why tensors of types with an interleaved form stay as they are."""
    targets = _targets(())
    able = [info for info in tensors if info.type.name in targets and info.name not in types]
    looked_up = [info.name for info in able if not _may_be_interleaved(info) and len(info.shape) > 1]
    unfit = [info.name for info in able if _may_be_interleaved(info)]
    notes = []
    if looked_up:
        notes.append(f"as they are, because their rows are looked up one by one: {', '.join(looked_up)}")
    if unfit:
        shown = ", ".join(in_layer_ranges(unfit))
        notes.append(f"as they are, because their rows fill no group: {shown}")
    return notes
