"""Change the layout of a GGUF file: decide, lay out, fill, publish.

`prepare` reads headers and decides everything, down to the exact size of the output, without reading a
weight; `change_layout` then has the output written (see quantize/fill/outputs.py).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from gguf_tools.argument_types import CheckedFields, checked
from gguf_tools.choices import with_choices
from gguf_tools.errors import BadRequest, NeedsImportance
from gguf_tools.format.shards import GGUFSet
from gguf_tools.format.shown import value_text
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import counted, size_text
from quantize.change import Changed, change_file
from quantize.fill.encode import RowSources
from quantize.fill.provenance import PROVENANCE_KEY
from quantize.fill.sources import GGUFSources, GGUFTensor, SourceTensor
from quantize.formats.codecs import ignores_importances, requires_importances
from quantize.importances import ImportanceSource
from quantize.importances.entries import Importances, ResolvedImportance, refuse_nonfinite, resolve
from quantize.importances.files import importance_file
from quantize.mla_layout.layouts import (
    HeadSizes,
    layout_of,
    metadata_in,
    place_of,
    relabelled,
    roles_in,
    tensors_by_layer,
)
from quantize.mla_layout.moves import (
    Encoded,
    How,
    JoinedHeads,
    Move,
    MovedRows,
    dropped,
    key_half,
    key_rows,
    plan_moves,
    refuse_uncodable,
    value_half,
)
from quantize.plan.decide import Decider, TensorPlan
from quantize.plan.overrides import Override, idle_overrides
from quantize.plan.plan import Plan
from quantize.prepare import Preparation, lay_out, parts_of
from quantize.roles import MLALayout, Role, in_layer_ranges, tensor_role
from quantize.run_options import RunChoices, RunOptions


@dataclass(frozen=True)
class LayoutOptions(CheckedFields):
    """Options of a change of layout.

    overrides    types for the tensors that have to be made, from `parse_overrides`. Otherwise rows that stay
                 as they are keep their type, and quantized values that are encoded again become Q8_0
    importances  weigh what is encoded again: a path, what `imatrix.load` returns, or a mapping tensor name ->
                 Importance or array
    keep_split   one output per part of the source
    """

    overrides: Sequence[Override] = ()
    importances: ImportanceSource | None = None
    keep_split: bool = False


class LayoutChoices(RunChoices, total=False):
    """The fields of LayoutOptions and RunOptions as keyword arguments."""

    overrides: Sequence[Override]
    importances: ImportanceSource | None
    keep_split: bool


@dataclass(frozen=True)
class LayoutChange:
    """All that is decided before a weight is read.

    source       the file or split set
    found        the layout of the source, None for a mixture
    wanted       the layout of the output
    sizes        of the heads
    moves        one for each tensor of the output, in order
    dropped      tensors of the input that the output lacks
    metadata     of the input; new_metadata of the output
    importances  by name of the tensor, for those that are weighed
    notes        what the user should know: options without effect
    preparation  the same as a plan, with the layout of the output
    """

    source: Path
    found: MLALayout | None
    wanted: MLALayout
    sizes: HeadSizes
    moves: tuple[Move, ...]
    dropped: tuple[TensorInfo, ...]
    metadata: Metadata
    new_metadata: Metadata
    importances: Mapping[str, ResolvedImportance]
    notes: tuple[str, ...]
    preparation: Preparation

    @property
    def is_needed(self) -> bool:
        """Whether the output would differ from the input."""
        return self.found != self.wanted or self.metadata != self.new_metadata

    def lines(self) -> Iterator[str]:
        """Yield a line for every kind of move and its number of layers; metadata, accuracy, size, notes."""
        if not self.is_needed:
            yield f"{self.source}: has layout {self.wanted} already; nothing is written"
            return
        yield f"{self.source}: layout {self.found or 'mixed'} -> {self.wanted}"
        n_layers: Counter[tuple[Role, str]] = Counter()
        n_others = 0
        for info, text in _texts(self):
            place = place_of(info)
            if place is None:
                n_others += 1
            else:
                n_layers[place[1], text] += 1
        for wanted in roles_in("both"):
            for (role, text), number in n_layers.items():
                if role is wanted:
                    yield f"  {role.value} of {counted(number, 'layer')}: {text}"
        yield f"  {counted(n_others, 'other tensor')}: as they are"
        for key, old, new in changed_keys(self):
            yield f"  {key}: {_key_text(old)} -> {_key_text(new)}"
        n_encoded = sum(not move.is_exact for move in self.moves)
        if n_encoded:
            yield f"{n_encoded} of {len(self.moves)} tensors are encoded anew, the others keep every weight"
        else:
            yield "lossless: every weight keeps its value"
        total = self.preparation.total_bytes
        yield f"output: {size_text(total)} ({total:,} bytes)"
        yield from (f"note: {note}" for note in self.notes)

    def describe(self, *, written: bool) -> dict[str, Any]:
        """Return the change as plain data for JSON.

        written  whether the outputs have been written
        """
        return {
            "source": str(self.source),
            "from": self.found,
            "to": self.wanted,
            "needed": self.is_needed,
            "lossless": all(move.is_exact for move in self.moves),
            "tensors": [_move_data(move, self) for move in self.moves],
            "dropped": [info.name for info in self.dropped],
            "metadata": [
                {"key": key, "from": old and old.plain, "to": new and new.plain}
                for key, old, new in changed_keys(self)
            ],
            "notes": list(self.notes),
            "total_bytes": self.preparation.total_bytes,
            "written": [str(output.path) for output in self.preparation.outputs] if written else [],
        }


@checked
def change_layout(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    to: MLALayout,
    options: LayoutOptions | None = None,
    run: RunOptions | None = None,
    **choices: Unpack[LayoutChoices],
) -> Changed[LayoutChange]:
    """Write the GGUF file `source` (or the split set it belongs to) as `output` in the layout `to`.

        change_layout("lite-ik.gguf", "lite.gguf", "split", n_threads=8)

    to       "split" for llama.cpp, "both" for ik_llama.cpp, "none" for plain attention
    options  what to make: LayoutOptions
    run      how to run: RunOptions
    choices  fields of both as keyword arguments; they replace those of `options` and `run`
    raises   ToolkitError. The old output then stays as it was, and finished work is kept for the next run

    A file that has the layout already is not written again: the result then has no paths.
    """
    options, run = with_choices(choices, options or LayoutOptions(), run or RunOptions())
    return change_file(source, lambda opened: prepare(opened, Path(output), to, options), row_sources, run)


def prepare(
    source: GGUFSet, output: Path, to: MLALayout, options: LayoutOptions | None = None
) -> LayoutChange:
    """Decide by which moves `source` gets the layout `to`, and lay the output out; see `change_layout`.

    raises  BadRequest     for a file without latent attention, or whose tensors contradict its metadata
            BadOverride    for a type whose blocks do not fit
            QuantError     when a tensor would have to be decoded from, or encoded to, a type without a codec
            BadImportance, NeedsImportance  as `quantize` does
    """
    options = options or LayoutOptions()
    overrides, given = options.overrides, options.importances
    matrix = None if given is None else importance_file(given)
    tensors = tuple(source.tensors.values())
    _refuse_odd_types(tensors, source.path)
    sizes = HeadSizes.from_metadata(source.metadata, source.path)
    layers = tensors_by_layer(tensors, sizes, source.path)
    found = layout_of(layers, sizes)
    moves = plan_moves(tensors, layers, to, sizes, overrides)
    refuse_uncodable(moves, source.path, to)
    entries: Importances = matrix.entries if matrix else {}
    weighed = _weigh(moves, entries, sizes)
    metadata = metadata_in(source.metadata, found, to, sizes)
    metadata = relabelled(metadata, tensors, [move.info for move in moves])
    if found != to or metadata != source.metadata:
        metadata.pop(PROVENANCE_KEY, None)  # numbers in the order of tensors, some of which are made anew
    plan = Plan(f"layout {to}", tuple(_tensor_plan(move, weighed.get(move.info.name)) for move in moves))
    # A new tensor goes where the first of its origins was.
    origins = ((move.info, move.moved[0].origin.name) for move in moves)
    parts = parts_of(source, origins, keep_split=options.keep_split)
    outputs = lay_out(output, metadata, parts, source.endian)
    read = {rows.origin.name: rows.origin.n_bytes for move in moves for rows in move.moved}
    return LayoutChange(
        source=source.path,
        found=found,
        wanted=to,
        sizes=sizes,
        moves=moves,
        dropped=dropped(tensors, moves),
        metadata=source.metadata,
        new_metadata=metadata,
        importances=weighed,
        notes=tuple(_notes(moves, overrides, entries, weighed)),
        preparation=Preparation(plan, outputs, sum(read.values())),
    )


def _refuse_odd_types(tensors: Iterable[TensorInfo], path: Path) -> None:
    for info in tensors:
        if info.type.tensor_meta_bytes:
            raise BadRequest(
                f"{path}: {info.name} is {info.type}, which keeps a scale behind its last row, expected types"
                " that are rows and nothing else"
            )


def _looks_at_importances(move: Move) -> bool:
    return not move.is_exact and not ignores_importances(move.info.type.name)


def _weigh(moves: Sequence[Move], entries: Importances, sizes: HeadSizes) -> dict[str, ResolvedImportance]:
    """Return the importances of the tensors whose encoding looks at them."""
    refuse_nonfinite(entries)
    weighed: dict[str, ResolvedImportance] = {}
    lacking: list[str] = []
    for move in filter(_looks_at_importances, moves):
        data = resolve(move.info, entries, sizes.n_heads)
        if data is not None:
            weighed[move.info.name] = data
        elif requires_importances(move.info.type.name):
            lacking.append(move.info.name)
    if lacking:
        remedy = "it has no data for them" if entries else "pass one with --imatrix"
        shown = ", ".join(in_layer_ranges(lacking))
        raise NeedsImportance(
            f"{len(lacking)} tensors of types that need an importance matrix, {remedy}: {shown}"
        )
    return weighed


def _tensor_plan(move: Move, data: ResolvedImportance | None) -> TensorPlan:
    """Return a move as a plan says it."""
    kept = all(rows.is_verbatim for rows in move.moved)
    return TensorPlan(
        name=move.info.name,
        shape=move.info.shape,
        role=tensor_role(move.info.name, move.info.shape).role,
        source_name=move.info.name,
        source_type=move.moved[0].origin.type,
        target_type=move.info.type,
        decider=Decider.KEPT if kept else Decider.RULES if move.rule is None else Decider.OVERRIDE,
        reason=move.how.value,
        entry=None if data is None else data.entry,
        weighting="" if data is None else data.reason,
        n_neutral=0 if data is None else data.n_neutral,
    )


def _notes(
    moves: Sequence[Move],
    overrides: Sequence[Override],
    entries: Importances,
    weighed: Mapping[str, ResolvedImportance],
) -> Iterator[str]:
    made = [move.info.name for move in moves if move.is_made]
    for idle in idle_overrides(overrides, made):
        why = "an earlier one decides" if idle.names else "it matches no tensor that has to be made"
        yield f"--tensor-type '{idle.override.text}' has no effect: {why}"
    if not entries:
        return
    looking = [move.info.name for move in moves if _looks_at_importances(move)]
    without = [name for name in looking if name not in weighed]
    if not looking:
        yield "the importance matrix has no effect: nothing is encoded to a type that looks at importances"
    elif without:
        yield f"no data in the importance matrix: {', '.join(in_layer_ranges(without))}"


# ---- filling


def row_sources(change: LayoutChange, source: GGUFSet) -> RowSources:
    """Find where the rows of the output come from."""
    make = partial(_moved, moves=change.moves, sizes=change.sizes, importances=change.importances)
    return RowSources(make(source), change.importances, GGUFSources(change.source, make))


def _moved(
    source: GGUFSet, moves: Iterable[Move], sizes: HeadSizes, importances: Mapping[str, ResolvedImportance]
) -> dict[str, SourceTensor]:
    """Make the tensors of an output of those of a file; see LayoutChange."""
    return {
        move.info.name: _source_tensor(move, source, sizes, importances.get(move.info.name)) for move in moves
    }


def _source_tensor(
    move: Move, source: GGUFSet, sizes: HeadSizes, importance: ResolvedImportance | None
) -> SourceTensor:
    name, shape = move.info.name, move.info.shape
    first, *others = (GGUFTensor(source, rows.origin.name) for rows in move.moved)
    if move.how is How.KEY_ROWS:
        return key_half(name, shape, first, sizes)
    if move.how is How.VALUE_ROWS:
        return value_half(name, shape, first, sizes)
    if move.how is How.JOINED:
        keys: SourceTensor = key_rows(name, first, sizes)
        if move.moved[1].is_verbatim and move.info.type.is_quantized:
            keys = Encoded(keys, move.info.type, _of_key_rows(importance, sizes))
        return JoinedHeads(name, shape, keys, sizes.nope, others[0], sizes.value)
    return first


def _of_key_rows(importance: ResolvedImportance | None, sizes: HeadSizes) -> ResolvedImportance | None:
    """Return the importances of attn_kv_b for its key rows, which are numbered without the value rows."""
    if importance is None:
        return None
    n_heads = importance.rows_per_weights // sizes.head_rows
    return replace(importance, rows_per_weights=n_heads * sizes.nope)


def changed_keys(change: LayoutChange) -> Iterator[tuple[str, Value | None, Value | None]]:
    """Yield (key, old value, new value) where they differ; None where there is no such key."""
    for key in dict.fromkeys([*change.metadata, *change.new_metadata]):
        old, new = change.metadata.get(key), change.new_metadata.get(key)
        if old != new:
            yield key, old, new


def _move_data(move: Move, change: LayoutChange) -> dict[str, Any]:
    weighed = change.importances.get(move.info.name)
    return {
        "name": move.info.name,
        "shape": list(move.info.shape),
        "type": move.info.type.name,
        "how": move.how.value,
        "of": [{"name": moved.origin.name, "type": moved.origin.type.name} for moved in move.moved],
        "exact": move.is_exact,
        "importance": None if weighed is None else weighed.entry,
    }


def _texts(change: LayoutChange) -> Iterator[tuple[TensorInfo, str]]:
    """Yield a line for every tensor of the output, then for those that go."""
    for move in change.moves:
        weighed = ", weighed by importances" if move.info.name in change.importances else ""
        yield move.info, _move_text(move) + weighed
    for info in change.dropped:
        yield info, f"dropped ({info.type})"


def _move_text(move: Move) -> str:
    first, *others = move.moved
    if move.how is How.KEPT:
        return _moved_text(first)
    if move.how is How.RESHAPED:
        dims = f"{len(first.origin.shape)}-D to {len(move.info.shape)}-D"
        return f"reshaped from {dims}, {_moved_text(first)}"
    if move.how is How.JOINED:
        keys, values = _moved_text(first), _moved_text(*others)
        return f"keys from attn_k_b, transposed, {keys}; values from attn_v_b, {values}"
    return f"{move.how.value}, {_moved_text(first)}"


def _moved_text(moved: MovedRows) -> str:
    old, new = moved.origin.type, moved.type
    if moved.is_exact:
        return f"as they are ({old})" if old == new else f"as they are ({old}, stored as {new})"
    return f"encoded {'again ' if old.is_quantized else ''}from {old} to {new}"


def _key_text(value: Value | None) -> str:
    return "absent" if value is None else value_text(value)
