"""Findings of `gguf-tools diff`: metadata and tensors that differ between two files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf_tools.format.block_layouts import can_swap, swap_bytes
from gguf_tools.format.header import encode_value
from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.shown import value_text
from gguf_tools.format.tensors import CHUNK_BYTES
from gguf_tools.format.values import Value
from gguf_tools.progress import NO_REPORT, Reporter
from gguf_tools.text import MAX_WIDTH, in_layer_ranges, printable

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    section  "file", "metadata" or "tensors"
    name     key, tensor, or property of the file
    a, b     what each file has under that name, as text; None if it has nothing
    """

    section: str
    name: str
    a: str | None
    b: str | None

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"section": self.section, "name": self.name, "a": self.a, "b": self.b}

    def as_text(self) -> str:
        """Return it as a line of text."""
        if self.b is None:
            return f"{self.section}: {printable(self.name)}: only in A: {self.a}"
        if self.a is None:
            return f"{self.section}: {printable(self.name)}: only in B: {self.b}"
        if self.a == self.b and self.section == "tensors":  # it says itself what differs
            return f"{self.section}: {printable(self.name)}: {self.a}"
        return f"{self.section}: {printable(self.name)}: {self.a} in A, {self.b} in B"


def as_lines(differences: Sequence[Difference]) -> Iterator[str]:
    """Yield differences as text; tensors of several layers that differ in the same way are one item.

    An item that is wider than MAX_WIDTH goes on in further lines, which are indented.
    """
    for item in _items(differences):
        yield from textwrap.wrap(item, MAX_WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _items(differences: Sequence[Difference]) -> Iterator[str]:
    ways: dict[tuple[str | None, str | None], list[str]] = {}
    for difference in differences:
        if difference.section == "tensors":
            ways.setdefault((difference.a, difference.b), []).append(difference.name)
        else:
            yield difference.as_text()
    for (of_a, of_b), names in ways.items():
        yield from (Difference("tensors", name, of_a, of_b).as_text() for name in in_layer_ranges(names))
    n_tensors = sum(map(len, ways.values()))
    if n_tensors > 1:
        yield f"{n_tensors} tensors differ"


def compare(
    a: GGUFSource, b: GGUFSource, *, data: bool = True, progress: Reporter = NO_REPORT
) -> list[Difference]:
    """Return all differences, in the order of A.

    data      compare the bytes of tensors that have the same shape and type; False looks at headers only
    progress  counts the tensors' bytes
    """
    differences = [
        Difference("file", name, str(of_a), str(of_b))
        for name, of_a, of_b in (
            ("byte order", a.endian, b.endian),
            ("alignment", a.alignment, b.alignment),
            ("version", a.version, b.version),
        )
        if of_a != of_b
    ]
    return differences + _compare_metadata(a, b) + _compare_tensors(a, b, data, progress)


def _compare_metadata(a: GGUFSource, b: GGUFSource) -> list[Difference]:
    differences = []
    for key in a.metadata | b.metadata:
        of_a, of_b = a.metadata.get(key), b.metadata.get(key)
        if of_a is not None and of_b is not None and encode_value(of_a) == encode_value(of_b):
            continue
        text_a, text_b = _value_text(of_a), _value_text(of_b)
        if text_a == text_b and of_a is not None and of_b is not None:
            place = _first_difference(of_a, of_b)
            text_a, text_b = (f"{text} (differs from {place} on)" for text in (text_a, text_b))
        differences.append(Difference("metadata", key, text_a, text_b))
    return differences


def _value_text(value: Value | None) -> str | None:
    return None if value is None else f"{value.type_name} {value_text(value)}"


def _first_difference(a: Value, b: Value) -> str:
    """Return where two values differ whose shortened texts are the same."""
    unit = "item" if isinstance(a.data, tuple) else "character"
    if not isinstance(a.data, tuple | str):
        return "its last digits"
    pairs = zip(a.data, b.data, strict=False)
    index = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.data), len(b.data)))
    return f"{unit} {index}"


def _compare_tensors(a: GGUFSource, b: GGUFSource, data: bool, progress: Reporter) -> list[Difference]:
    differences = []
    infos = a.tensors | b.tensors
    progress.start(sum(info.n_bytes for info in infos.values()), 0)
    for name, info in infos.items():
        of_a, of_b = (_tensor_text(source, name) for source in (a, b))
        if of_a != of_b:
            if data and (longer := _padded(a, b, name)) is not None:
                same = "the same with zeros behind it"
                of_a, of_b = (f"{of_a}, {same}", of_b) if longer is a else (of_a, f"{of_b}, {same}")
            differences.append(Difference("tensors", name, of_a, of_b))
        elif data:
            row = _first_different_row(a, b, name)
            if row is not None:
                same = f"{of_a}, other data from row {row} on"
                differences.append(Difference("tensors", name, same, same))
        progress.advance(info.n_bytes)
    if list(a.tensors) != list(b.tensors) and a.tensors.keys() == b.tensors.keys():
        differences.append(Difference("tensors", "order", _order_text(a, b), _order_text(b, a)))
    return differences


def _tensor_text(source: GGUFSource, name: str) -> str | None:
    info = source.tensors.get(name)
    return None if info is None else f"{info.type.name} {' x '.join(map(str, info.shape))}"


def _padded(a: GGUFSource, b: GGUFSource, name: str) -> GGUFSource | None:
    """Find which file has the floats of the other with zeros behind rows and matrices; None: neither has."""
    infos = a.tensors.get(name), b.tensors.get(name)
    if infos[0] is None or infos[1] is None or infos[0].type != infos[1].type or infos[0].type.is_quantized:
        return None
    pairs = list(zip(infos[0].shape, infos[1].shape, strict=False))
    if len(infos[0].shape) != len(infos[1].shape) or infos[0].n_mats != infos[1].n_mats:
        return None
    long, short = (a, b) if all(x >= y for x, y in pairs) else (b, a)
    if not all(x >= y for x, y in zip(long.tensors[name].shape, short.tensors[name].shape, strict=True)):
        return None
    return long if all(_begins_with(long, short, name, mat) for mat in range(infos[0].n_mats)) else None


def _begins_with(long: GGUFSource, short: GGUFSource, name: str, mat: int) -> bool:
    """Whether a matrix of a tensor is the other file's with zeros behind its rows and below."""
    import numpy as np

    infos = long.tensors[name], short.tensors[name]
    n_long, n_short = (info.n_rows // info.n_mats for info in infos)
    step = max(1, CHUNK_BYTES // infos[0].row_bytes)
    for start in range(0, n_long, step):
        stop = min(start + step, n_long)
        stored = long.read_rows(name, mat * n_long + start, mat * n_long + stop)
        rows = _in_little_endian(long, name, stored).reshape(stop - start, -1)
        kept = max(0, min(stop, n_short) - start)
        expected = np.zeros_like(rows)
        if kept:
            first = mat * n_short + start
            stored = short.read_rows(name, first, first + kept)
            stored = _in_little_endian(short, name, stored).reshape(kept, -1)
            expected[:kept, : stored.shape[1]] = stored
        if not np.array_equal(rows, expected):
            return False
    return True


def _order_text(source: GGUFSource, other: GGUFSource) -> str:
    index, name = next(
        (index, name)
        for index, (name, of_other) in enumerate(zip(source.tensors, other.tensors, strict=True))
        if name != of_other
    )
    return f"{printable(name)} at {index}"


def _first_different_row(a: GGUFSource, b: GGUFSource, name: str) -> int | None:
    import numpy as np

    info = a.tensors[name]
    step = max(1, CHUNK_BYTES // info.row_bytes) * info.row_bytes
    for start in range(0, info.n_bytes, step):
        of_a, of_b = (
            _in_little_endian(source, name, source.read_bytes(name, start, start + step)) for source in (a, b)
        )
        if not np.array_equal(of_a, of_b):
            return (start + int(np.argmax(of_a != of_b))) // info.row_bytes
    return None


def _in_little_endian(source: GGUFSource, name: str, rows: np.ndarray) -> np.ndarray:
    """Return rows as a little-endian file has them; as they are where that is not known of their type."""
    type_ = source.tensors[name].type
    return swap_bytes(type_, rows) if source.endian == "big" and can_swap(type_) else rows
