"""Moves: how each tensor of the new file is made, and which type it gets, then its rows.

Rows of attn_kv_b and attn_v_b lie along the latent, those of attn_k_b across it. So

    attn_v_b   is whole rows of attn_kv_b, and the other way round: any type is regrouped without a change
    attn_k_b   is transposed, and a block of a quantized type lies in a row: its values are decoded and
               encoded again, which costs accuracy
    2-D, 3-D   only differ in the header

Whatever is encoded again gets Q8_0. In the small trained model as Q4_K_M, attn_k_b (Q5_0) is off by 4.5 %.
The keys of an attn_kv_b made from it are off by 4.5 % as Q8_0, and by 8.4 % as Q4_K, the type of attn_v_b,
which would have kept the value rows as they are. ik_llama.cpp also uses Q8_0 for tensors that a file lacks,
when it loads the file. The user may choose otherwise. Tensors that are there already keep their type.

Moves are pure data. Tensors of the input that are encoded again, or joined head by head, become sources that
the encoder fills a file from, still unread. See fill/sources.py for heads that are picked or transposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadOverride, QuantError
from gguf_tools.format.ggml_types import BF16, F16, F32, Q8_0, GGMLType
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.text import quoted
from quantize.fill.chunks import RowRange
from quantize.fill.encode import RowSources, encode_rows
from quantize.fill.sources import (
    FLOAT_DTYPES,
    HeadRows,
    MadeOfTensor,
    SourceTensor,
    TransposedHeads,
    float_type,
    split_rows,
)
from quantize.formats import available, decodable, get_format
from quantize.importances.entries import ResolvedImportance
from quantize.mla_layout.layouts import HeadSizes, LayerTensors, place_of, roles_in, tensor_name
from quantize.plan.overrides import Override, find_override
from quantize.roles import MLALayout, Role, file_order, in_layer_ranges

_FLOATS = frozenset({F32, F16, BF16})


class How(Enum):
    """How a tensor of the new file is made."""

    KEPT = "kept"
    RESHAPED = "reshaped"
    KEY_ROWS = "key rows of attn_kv_b, transposed"
    VALUE_ROWS = "value rows of attn_kv_b"
    JOINED = "attn_k_b transposed and attn_v_b, joined head by head"


@dataclass(frozen=True)
class MovedRows:
    """All rows of a new tensor, or its key rows, or its value rows.

    origin    the tensor of the input that they are made of
    type      what they become
    regroups  whether rows of the origin can be taken as they are stored
    """

    origin: TensorInfo
    type: GGMLType
    regroups: bool

    @property
    def is_verbatim(self) -> bool:
        """Whether stored rows are copied, whatever they hold."""
        return self.regroups and self.origin.type == self.type

    @property
    def is_exact(self) -> bool:
        """Whether every weight keeps its value."""
        same = self.origin.type == self.type or self.type == F32
        return self.is_verbatim or (same and self.origin.type in _FLOATS)


@dataclass(frozen=True)
class Move:
    """One tensor of the new file.

    info    as it will be
    how     its rows come about
    moved   all its rows, or key rows and value rows where they are joined
    rule    the user's choice of its type, if there is one
    """

    info: TensorInfo
    how: How
    moved: tuple[MovedRows, ...]
    rule: Override | None = None

    @property
    def is_made(self) -> bool:
        """Whether the input has no tensor of this name."""
        return self.how not in (How.KEPT, How.RESHAPED)

    @property
    def is_exact(self) -> bool:
        return all(rows.is_exact for rows in self.moved)


def plan_moves(
    tensors: Sequence[TensorInfo],
    layers: Mapping[int, LayerTensors],
    wanted: MLALayout,
    sizes: HeadSizes,
    overrides: Sequence[Override] = (),
) -> tuple[Move, ...]:
    """Return one move for each tensor of the new file, in its order.

    tensors    of the input, in order
    layers     those of latent attention, from `tensors_by_layer`
    overrides  types for tensors that have to be made; the first that matches wins
    raises     BadOverride for a type whose blocks do not fit

    A layer's tensors stand where the first of its old ones stood, as the converter writes them; a file in
    the quantizer's order, sorted by layer and name, stays so.
    """
    moves: list[Move] = []
    done: set[int] = set()
    for info in tensors:
        place = place_of(info)
        if place is None:
            moves.append(Move(info, How.KEPT, (MovedRows(info, info.type, True),)))
            continue
        layer, _ = place
        if layer not in done:
            done.add(layer)
            old = layers[layer]
            moves += (_move(layer, role, old, wanted, sizes, overrides) for role in roles_in(wanted))
    names = [info.name for info in tensors]
    if names == file_order(names):
        by_name = {move.info.name: move for move in moves}
        return tuple(by_name[name] for name in file_order(by_name))
    return tuple(moves)


def _move(
    layer: int,
    role: Role,
    tensors: LayerTensors,
    wanted: MLALayout,
    sizes: HeadSizes,
    overrides: Sequence[Override],
) -> Move:
    name, shape = tensor_name(layer, role), sizes.shape(role, wanted)
    if role in tensors:
        origin = tensors[role]
        if origin.shape == shape:
            return Move(origin, How.KEPT, (MovedRows(origin, origin.type, True),))
        rows = MovedRows(origin, origin.type, _has_whole_groups(origin.type, sizes.head_shape(role)[0]))
        return Move(TensorInfo(name, shape, origin.type), How.RESHAPED, (rows,))
    how, origins = _sources(role, tensors)
    types = {origin.type for origin in origins}
    whole = all(_has_whole_groups(type_, sizes.nope, sizes.value) for type_ in types)
    rule = find_override(overrides, name)
    if rule is not None:
        type_ = _fitting(rule, name, shape)
    elif how is How.VALUE_ROWS and whole:
        (type_,) = types
    else:
        type_ = _default_type(types, shape[-1])
    # Of joined rows, the value rows lie as in attn_v_b; key rows are always transposed.
    regroups = {How.VALUE_ROWS: (whole,), How.KEY_ROWS: (False,), How.JOINED: (False, whole)}[how]
    moved = tuple(MovedRows(origin, type_, r) for origin, r in zip(origins, regroups, strict=True))
    return Move(TensorInfo(name, shape, type_), how, moved, rule)


def _sources(role: Role, tensors: LayerTensors) -> tuple[How, tuple[TensorInfo, ...]]:
    """Return how a missing tensor is made, and of which tensors."""
    if role is Role.ATTN_KV_B:
        return How.JOINED, (tensors[Role.ATTN_K_B], tensors[Role.ATTN_V_B])
    how = How.KEY_ROWS if role is Role.ATTN_K_B else How.VALUE_ROWS
    return how, (tensors[Role.ATTN_KV_B],)


def _has_whole_groups(type_: GGMLType, *counts: int) -> bool:
    """Whether runs of so many rows cut no group of rows that are stored interleaved."""
    return not any(count % type_.rows_interleaved for count in counts)


def _default_type(origins: set[GGMLType], n_cols: int) -> GGMLType:
    """Return the type of a tensor that is encoded again."""
    if origins <= _FLOATS:
        return next(iter(origins)) if len(origins) == 1 else F32
    return F16 if n_cols % Q8_0.block_elems else Q8_0


def _fitting(rule: Override, name: str, shape: tuple[int, ...]) -> GGMLType:
    if shape[-1] % rule.type.block_elems:
        other = _default_type({rule.type}, shape[-1])
        raise BadOverride(
            f"{quoted(rule.text)}: {name} has rows of {shape[-1]}, which is no multiple of"
            f" {rule.type.block_elems}; choose a type of smaller blocks, for instance {other}"
        )
    return rule.type


def dropped(tensors: Iterable[TensorInfo], moves: Iterable[Move]) -> tuple[TensorInfo, ...]:
    """Return the tensors of the input that the new file lacks."""
    names = {move.info.name for move in moves}
    return tuple(info for info in tensors if info.name not in names)


def refuse_uncodable(moves: Iterable[Move], path: Path, wanted: MLALayout) -> None:
    """Raise QuantError, naming the tensors, when some would have to pass through a type without a codec."""
    known = {"decoded": decodable(), "encoded": available()}
    stuck: dict[tuple[str, str], list[str]] = {}
    for move in moves:
        for rows in move.moved:
            if rows.is_verbatim:
                continue
            for type_, verb in ((rows.origin.type, "decoded"), (rows.type, "encoded")):
                if type_.name not in known[verb]:
                    concerned = rows.origin if verb == "decoded" else move.info
                    stuck.setdefault((type_.name, verb), []).append(concerned.name)
    if not stuck:
        return
    (type_name, verb), names = next(iter(stuck.items()))
    shown = ", ".join(in_layer_ranges(names))
    if verb == "encoded":
        raise QuantError(
            f"{shown}: {type_name} can't be encoded here; choose one of {', '.join(available())}"
        )
    raise QuantError(
        f"{path}: {shown} ({type_name}) must be decoded to lay them out as {wanted}, and {type_name} can't be"
        f" decoded here; start from a file whose attn_k_b, attn_v_b or attn_kv_b are of another type, or"
        f" convert the checkpoint with --mla {wanted}"
    )


@dataclass(frozen=True)
class Encoded(MadeOfTensor):
    """A tensor of floats as rows of a quantized type, encoded when they are read.

    importance  of its rows; a read crosses no border between its groups of rows
    """

    tensor: SourceTensor
    type: GGMLType
    importance: ResolvedImportance | None = None

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        codec = get_format(self.type)
        return codec.decode(self.raw_rows(start, stop).reshape(stop - start, -1), self.shape[-1])

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the rows as blocks; raises BadWeights as `encode_rows` does."""
        weighed = {} if self.importance is None else {self.name: self.importance}
        sources = RowSources({self.name: self.tensor}, weighed)
        return encode_rows(RowRange(self.name, start, stop), self.type, sources)


def key_half(
    name: str, shape: tuple[int, ...], kv_b: SourceTensor, sizes: HeadSizes
) -> TransposedHeads[SourceTensor]:
    """The key rows of attn_kv_b, transposed head by head: what attn_k_b holds."""
    return TransposedHeads(name, shape, kv_b, sizes.head_rows, 0, sizes.nope)


def value_half(
    name: str, shape: tuple[int, ...], kv_b: SourceTensor, sizes: HeadSizes
) -> HeadRows[SourceTensor]:
    """The value rows of attn_kv_b: what attn_v_b holds."""
    return HeadRows(name, shape, kv_b, sizes.head_rows, sizes.nope, sizes.value)


def key_rows(name: str, k_b: SourceTensor, sizes: HeadSizes) -> TransposedHeads[SourceTensor]:
    """The rows of attn_k_b, transposed back: the key rows that attn_kv_b has, (n_heads * nope, kv_lora)."""
    shape = (sizes.n_heads * sizes.nope, sizes.kv_lora)
    return TransposedHeads(name, shape, k_b, sizes.kv_lora, 0, sizes.kv_lora)


@dataclass(frozen=True)
class JoinedHeads:
    """Two tensors of the same row length, joined head by head: rows of `upper`, then rows of `lower`.

    upper_rows, lower_rows  rows of one head in each
    """

    name: str
    shape: tuple[int, ...]
    upper: SourceTensor
    upper_rows: int
    lower: SourceTensor
    lower_rows: int

    @property
    def type(self) -> GGMLType:
        """That of both, F32 when they differ."""
        return self.upper.type if self.upper.type == self.lower.type else F32

    @property
    def by_rows(self) -> bool:
        return self.upper.by_rows and self.lower.by_rows

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        rows = np.empty((stop - start, self.shape[-1]), FLOAT_DTYPES[float_type(self)])
        filled = 0
        for tensor, low, high in self._runs(start, stop):
            rows[filled : filled + high - low] = tensor.read_rows(low, high)
            filled += high - low
        return rows

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        if self.upper.type != self.lower.type:
            return self.read_rows(start, stop).reshape(-1).view(np.uint8)
        return np.concatenate([tensor.raw_rows(low, high) for tensor, low, high in self._runs(start, stop)])

    def _runs(self, start: int, stop: int) -> Iterator[tuple[SourceTensor, int, int]]:
        border = self.upper_rows
        for head, low, high in split_rows(start, stop, self.upper_rows + self.lower_rows):
            if low < border:
                base = head * self.upper_rows
                yield self.upper, base + low, base + min(high, border)
            if high > border:
                base = head * self.lower_rows - border
                yield self.lower, base + max(low, border), base + high
