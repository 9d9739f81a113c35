"""Possible faults of a tensor: a table of hypotheses, each with what the file would then hold.

A hypothesis proposes candidates: for any rows of the file, the rows that they would be made of. Whoever tests
them (diagnose.py) compares the file's bad rows with each, and the one that explains them wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from convert.audit.base import AuditBase
from convert.audit.expected import Floats32, as_encoded, limits_of, read_rows
from convert.audit.judge import Pair
from convert.audit.measure import Indices, rows_of_a_matrix
from convert.audit.search import column_order, nearest_matrices, row_order
from convert.audit.transforms import (
    Move,
    Rows,
    halves_turned,
    interleaved,
    moved,
    one_below_the_other,
    recut,
    taken_apart,
    transposed,
    within,
)
from gguf_tools.errors import ToolkitError
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.hparams import Size
from quantize.fill.sources import HeadRows, SourceTensor, TransposedHeads
from quantize.formats.codecs import CODECS, needs_importances
from quantize.mla_layout.layouts import HeadSizes
from quantize.roles import in_layer, layer_of


@dataclass(frozen=True)
class Candidate:
    """Possible content of a tensor of the file.

    kind   a short name for programs
    text   what is wrong then, in words that follow the tensor's name
    rows   numbers of rows -> what they would be made of
    holds  name of the tensor of the base that is there in place of its own, "" for none
    moves  matrix of the file -> matrix of the base that it holds, where a stack is in another order
    """

    kind: str
    text: str
    rows: Rows
    holds: str = ""
    moves: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Suspect:
    """A tensor of which some rows are bad.

    pair   the tensor, of the file and of the base
    base   all of the base
    rows   a sample of the bad rows, int64 (n,)
    found  the file's weights there, float32 (n, n_cols)
    """

    pair: Pair
    base: AuditBase
    rows: Indices
    found: Floats32

    @property
    def name(self) -> str:
        """The tensor's name in the base."""
        return self.pair.base.name

    @property
    def n_rows(self) -> int:
        """Rows of a matrix."""
        return rows_of_a_matrix(self.pair.info)

    @property
    def matrices(self) -> list[int]:
        """The matrices that the sample is from."""
        return [int(matrix) for matrix in np.unique(self.rows // self.n_rows)]

    @property
    def n_mats(self) -> int:
        return self.pair.info.n_rows // self.n_rows


Propose = Callable[[Suspect], Iterator[Candidate]]


# ---- vectors


def _norm(suspect: Suspect) -> Iterator[Candidate]:
    base = suspect.pair.base
    yield Candidate(
        "norm-plus-one", "1 was added to a norm that has it already", lambda rows: read_rows(base, rows) + 1
    )
    yield Candidate(
        "norm-minus-one", "1 was not added to the norm, as the base's is stored",
        lambda rows: read_rows(base, rows) - 1,
    )  # fmt: skip


# ---- heads


def _number(size: Size) -> int:
    return max(size) if isinstance(size, tuple) and size else size if isinstance(size, int) else 0


def _rope(suspect: Suspect) -> Iterator[Candidate]:
    for size, first, count in _rotated(suspect):
        for kind, text, move in (
            ("rope-permuted", "rows of its heads are permuted for the other kind of rope (the halves of a"
             " head interleaved), the base's are not", interleaved(count)),
            ("rope-not-permuted", "rows of its heads are not permuted for rope (the halves of a head"
             " interleaved), the base's are", taken_apart(count)),
        ):  # fmt: skip
            part = "" if (first, count) == (0, size) else f", of each rows {first} to {first + count - 1}"
            shown = f"{text}; heads of {size} rows{part}"
            yield Candidate(kind, shown, moved(suspect.pair.base, within(size, first, count, move)))


def _rotated(suspect: Suspect) -> Iterator[tuple[int, int, int]]:
    """Yield (rows of a head, first rotated row, rotated rows) in all ways in which a model may mean it."""
    hparams, heads, info = suspect.base.hparams, suspect.base.heads, suspect.pair.info
    n_rows = info.n_cols if info.n_rows == 1 else info.n_rows
    rope = _number(hparams.rope_dimension_count)
    counts = [_number(hparams.head_count), _number(hparams.head_count_kv)]
    sizes = [_number(hparams.key_length), *(n_rows // count for count in counts if count)]
    if counts[0]:
        sizes.append(_number(hparams.embedding_length) // counts[0])
    if heads is not None:
        sizes += [heads.nope + heads.rope, heads.kv_lora + heads.rope]
    seen = set()
    for size in sizes:
        for first, count in ((0, size), (0, rope), (size - rope, rope)):
            fits = count >= 4 and count % 2 == 0 and first >= 0 and first + count <= size
            if fits and n_rows % size == 0 and (size, first, count) not in seen:
                seen.add((size, first, count))
                yield size, first, count


def _halves(suspect: Suspect) -> Iterator[Candidate]:
    heads, name = suspect.base.heads, suspect.name
    layer = layer_of(name)
    whole = None if layer is None else suspect.base.find(f"blk.{layer}.attn_kv_b.weight")
    if heads is None or whole is None:
        return
    make = {"attn_kv_b": _whole_kv_b, "attn_k_b": _key_half, "attn_v_b": _value_half}
    for part, propose in make.items():
        if part in name:
            yield from propose(whole, heads)


_MIXED = "key and value halves are mixed up"
_NOT_BY_HEAD = "keys of all heads were taken to come before values of all heads; they alternate head by head"


def _whole_kv_b(whole: SourceTensor, heads: HeadSizes) -> Iterator[Candidate]:
    turned = within(heads.head_rows, 0, heads.head_rows, halves_turned(heads.nope, heads.value))
    yield Candidate("kv-halves", f"{_MIXED}: each head has its values first", moved(whole, turned))
    apart = one_below_the_other(heads.n_heads, heads.nope, heads.value)
    text = f"{_MIXED}: keys of all heads come before values of all"
    yield Candidate("kv-halves", text, moved(whole, apart))


def _key_half(whole: SourceTensor, heads: HeadSizes) -> Iterator[Candidate]:
    shape, rows = (heads.n_heads * heads.kv_lora, heads.nope), heads.head_rows
    last = TransposedHeads("", shape, whole, rows, rows - heads.nope, heads.nope)
    yield Candidate("kv-halves", f"{_MIXED}: it holds the values", _all_of(last))
    first = TransposedHeads("", shape, whole, heads.nope, 0, heads.nope)
    yield Candidate("kv-halves", _NOT_BY_HEAD, _all_of(first))
    keys_ = HeadRows("", (heads.n_heads * heads.nope, heads.kv_lora), whole, rows, 0, heads.nope)
    yield Candidate("k-not-transposed", "keys are not transposed", recut(keys_, heads.nope))


def _value_half(whole: SourceTensor, heads: HeadSizes) -> Iterator[Candidate]:
    shape, rows = (heads.n_heads * heads.value, heads.kv_lora), heads.head_rows
    first = HeadRows("", shape, whole, rows, 0, heads.value)
    yield Candidate("kv-halves", f"{_MIXED}: it holds the keys", _all_of(first))
    behind: Move = lambda places: heads.n_heads * heads.nope + places  # noqa: E731
    yield Candidate("kv-halves", _NOT_BY_HEAD, moved(whole, behind))


def _all_of(source: SourceTensor) -> Rows:
    return lambda rows: read_rows(source, rows)


# ---- other tensors


def _partners(suspect: Suspect) -> Iterator[Candidate]:
    """Propose the other tensors of the same size in the same layer, then those of the same name in others."""
    layer, base, info = layer_of(suspect.name), suspect.base, suspect.pair.info
    here = [name for name in base.tensors if layer_of(name) == layer]
    layers = sorted({found for name in base.tensors if (found := layer_of(name)) is not None})
    there = [in_layer(suspect.name, other) for other in layers] if layer is not None else []
    for name in dict.fromkeys([*here, *there]):
        other = base.tensors.get(name)
        if other is None or name == suspect.name:
            continue
        if (int(np.prod(other.shape[:-1], dtype=np.int64)), other.shape[-1]) != (info.n_rows, info.n_cols):
            continue
        kind = "swapped-tensor" if layer_of(name) == layer else "other-layer"
        yield Candidate(kind, f"it holds the base's {name}", _all_of(other), holds=name)


def _experts(suspect: Suspect) -> Iterator[Candidate]:
    """Propose the other matrices of a stack, and those of its partners, for a single bad matrix."""
    if suspect.n_mats == 1 or len(suspect.matrices) != 1:
        return
    (matrix,) = suspect.matrices
    for other in nearest_matrices(suspect.pair.base, suspect.rows, suspect.found, suspect.n_rows, matrix):
        shift = (other - matrix) * suspect.n_rows
        yield Candidate(
            "expert-misplaced", f"matrix {matrix} holds the base's {other}",
            moved(suspect.pair.base, lambda rows, shift=shift: rows + shift),  # type: ignore[misc]
            moves={matrix: other},
        )  # fmt: skip


# ---- one matrix by itself


def _transposed(suspect: Suspect) -> Iterator[Candidate]:
    rows = transposed(suspect.pair.base, suspect.n_rows)
    if rows is not None:
        yield Candidate("transposed", "it is transposed", rows)


def _negated(suspect: Suspect) -> Iterator[Candidate]:
    base = suspect.pair.base
    yield Candidate("sign", "its sign is turned", lambda rows: -read_rows(base, rows))


def _other_order(suspect: Suspect) -> Iterator[Candidate]:
    """Propose rows, or columns, in the order in which they are found to match the base's."""
    base, info = suspect.pair.base, suspect.pair.info
    rows = row_order(base, suspect.rows, suspect.found, suspect.n_rows)
    if rows is not None:
        by_row = dict(zip(suspect.rows.tolist(), rows.tolist(), strict=True))
        shifts = {there - here for here, there in by_row.items()}
        if len(shifts) == 1:
            (shift,) = shifts
            text = f"rows are shifted by {abs(shift)}: row {suspect.rows[0]} holds the base's row {rows[0]}"
        else:
            pairs = ", ".join(f"row {here} the base's {there}" for here, there in list(by_row.items())[:3])
            text = f"rows are in another order: {pairs}"
        yield Candidate(
            "rows-moved", text,
            lambda wanted: read_rows(base, np.array([by_row.get(row, row) for row in wanted.tolist()])),
        )  # fmt: skip
    columns = column_order(base, suspect.rows, suspect.found) if info.n_rows > 1 else None
    if columns is not None:
        first = int(np.flatnonzero(columns != np.arange(len(columns)))[0])
        text = f"columns are in another order: column {first} holds the base's {columns[first]}"
        yield Candidate("columns-moved", text, lambda wanted: read_rows(base, wanted)[:, columns])


_LOWER_TYPES = sorted(
    (
        name
        for name, codec in CODECS.items()
        if name in ("F16", "BF16")
        or (codec.is_candidate and not codec.slow_on and not needs_importances(name))
    ),
    key=lambda name: CODECS[name].typical_error,
)
"""Types that files are made from which are encoded again, from small errors to large."""


def _requantized(suspect: Suspect) -> Iterator[Candidate]:
    """Propose what another type has made of the base before."""
    base, info = suspect.pair.base, suspect.pair.info
    for name in _LOWER_TYPES:
        type_ = by_name(name)
        if info.n_cols % type_.block_elems or limits_of(type_).relative < limits_of(info.type).relative / 2:
            continue

        def rows_of(rows: Indices, name: str = name) -> Floats32:
            wanted = read_rows(base, rows)
            encoded = as_encoded(by_name(name), wanted)
            return wanted if encoded is None else encoded[1]

        kind = "requantized" if type_.is_quantized else "rounded"
        text = f"it was encoded from {name}, not from the base's own weights"
        yield Candidate(kind, text, rows_of)


HYPOTHESES: tuple[tuple[tuple[str, ...], Propose], ...] = (
    (("norm",), _norm),
    (("attn_q", "attn_k", "indexer"), _rope),
    (("attn_kv_b", "attn_k_b", "attn_v_b"), _halves),
    (("",), _partners),
    (("_exps",), _experts),
    (("",), _transposed),
    (("",), _negated),
    (("",), _other_order),
    (("",), _requantized),
)
"""Things that go wrong with tensors whose name has one of the parts; "" is part of any.

In this order: of two that explain as much, the first wins."""


def candidates(suspect: Suspect) -> Iterator[Candidate]:
    """Yield what a tensor may hold; what a hypothesis can't read is none of its candidates."""
    for parts, propose in HYPOTHESES:
        if not any(part in suspect.name for part in parts):
            continue
        try:
            yield from propose(suspect)
        except ToolkitError:
            continue
