"""What a change of layout does to a file, as lines for people and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from gguf_tools.text import size_text, value_text
from quantize.change import Changed
from quantize.mla_layout.layouts import place_of, roles_in
from quantize.mla_layout.moves import How, Move, MovedRows
from quantize.mla_layout.pipeline import LayoutChange
from quantize.roles import Role


def change_lines(change: LayoutChange) -> Iterator[str]:
    """Yield a line for every kind of move with its number of layers, then metadata, accuracy, size, notes."""
    if not change.is_needed:
        yield f"{change.source}: has layout {change.wanted} already; nothing is written"
        return
    yield f"{change.source}: layout {change.found or 'mixed'} -> {change.wanted}"
    n_layers: Counter[tuple[Role, str]] = Counter()
    n_others = 0
    for info, text in _texts(change):
        place = place_of(info)
        if place is None:
            n_others += 1
        else:
            n_layers[place[1], text] += 1
    for wanted in roles_in("both"):
        for (role, text), number in n_layers.items():
            if role is wanted:
                yield f"  {role.value} of {_count(number, 'layer')}: {text}"
    yield f"  {_count(n_others, 'other tensor')}: as they are"
    for key, old, new in changed_keys(change):
        yield f"  {key}: {_key_text(old)} -> {_key_text(new)}"
    n_encoded = sum(not move.is_exact for move in change.moves)
    if n_encoded:
        yield f"{n_encoded} of {len(change.moves)} tensors are encoded anew, the others keep every weight"
    else:
        yield "lossless: every weight keeps its value"
    total = change.preparation.total_bytes
    yield f"output: {size_text(total)} ({total:,} bytes)"
    yield from (f"note: {note}" for note in change.notes)


def result_lines(result: Changed[LayoutChange]) -> Iterator[str]:
    """Yield the lines of the change, then where the output is and how long it took."""
    yield from change_lines(result.change)
    if result.written is None:
        return
    if result.written.n_resumed:
        done, n_chunks = result.written.n_resumed, result.written.n_chunks
        yield f"went on from an interrupted run: {done} of {n_chunks} chunks were done"
    first, *others = result.paths
    more = f" and {len(others)} more parts" if others else ""
    yield f"wrote {first}{more} in {result.seconds:.1f} s"


def describe(change: LayoutChange, *, written: bool) -> dict[str, Any]:
    """Return the change as plain data for JSON.

    written  whether the outputs have been written
    """
    return {
        "source": str(change.source),
        "from": change.found,
        "to": change.wanted,
        "needed": change.is_needed,
        "lossless": all(move.is_exact for move in change.moves),
        "tensors": [_move_data(move, change) for move in change.moves],
        "dropped": [info.name for info in change.dropped],
        "metadata": [
            {"key": key, "from": old and old.plain, "to": new and new.plain}
            for key, old, new in changed_keys(change)
        ],
        "notes": list(change.notes),
        "total_bytes": change.preparation.total_bytes,
        "written": [str(output.path) for output in change.preparation.outputs] if written else [],
    }


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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
