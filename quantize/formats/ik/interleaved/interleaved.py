"""Interleaved types: exact regroupings of their base type's rows, there and back without a loss.

`to_base` and `from_base` move bits by a permutation, which comes from the two layouts of a type
(`group_layouts`). Where all moves of a type are of 2, 4 or 8 bits, so many are moved at a time. What is in
front of the base type's rows is in front of the group, row after row.

Three types have their signs in another code besides. Of a group of eight the base type stores seven signs,
and the eighth follows from them. In the other code a bit is the parity of the signs up to there. Either takes
the upper 7 bits of a byte.

Q8_KV_R8 is regrouped by its own module: its rows are shorter than Q8_KV's, by a sum that follows from codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import ShapeError
from gguf_tools.format.ggml_types import Q8_KV_R8, GGMLType, by_name
from quantize.formats import get_decoder, get_format
from quantize.formats.base import (
    BlockRefused,
    Bytes,
    Decode,
    Floats32,
    QuantFormat,
    Rows,
    check_data,
    check_rows,
)
from quantize.formats.codecs import INTERLEAVED, REGROUPED
from quantize.formats.ik.interleaved import q8_r8
from quantize.formats.ik.interleaved.group_layouts import GROUP_LAYOUTS, base_layout
from quantize.formats.ik.rows import as_groups, read_only
from quantize.importances.weighting import Weighting
from quantize.simd.kernel import kernel

_ANY = np.arange(256)

_PLAIN = ((_ANY ^ (_ANY & 0xFE) << 1) & 0xFF).astype(np.uint8)
"""The signs of the base type, by the byte in the other code."""

_CODED = np.argsort(_PLAIN).astype(np.uint8)
"""The inverse of _PLAIN."""


def base_of(type_: GGMLType) -> GGMLType:
    """Return the base type of an interleaved type; raises KeyError for any other."""
    return by_name(REGROUPED[type_.name])


def to_base(type_: GGMLType, data: Bytes, n_cols: int) -> Bytes:
    """Return rows of an interleaved type as rows of its base type.

    data     uint8 (n_rows, row bytes), whole groups of rows
    returns  uint8 (n_rows, row bytes)
    raises   ShapeError if n_cols columns do not take so many bytes, or rows fill no group
    """
    if type_ == Q8_KV_R8:
        return q8_r8.to_base(data, n_cols)
    _check(type_, data, n_cols)
    groups = as_groups(data, type_)
    groups = _recoded(type_, groups, _PLAIN)
    out = np.empty_like(groups)
    _rows_meta(type_, out)[:] = _group_meta(type_, groups)
    moves = _moves(type_)
    base, interleaved = _places(type_, n_cols)
    orders = moves.to_base(base, interleaved)
    _regroup(read_only(groups), orders, n_cols // moves.cell_elems, moves.bits, out)
    return out.reshape(data.shape)


def from_base(type_: GGMLType, data: Bytes, n_cols: int) -> Bytes:
    """Return rows of the base type as rows of an interleaved type: what `to_base` takes back.

    data, returns, raises  as of `to_base`
    """
    if type_ == Q8_KV_R8:
        return q8_r8.from_base(data, n_cols)
    _check(type_, data, n_cols)
    groups = as_groups(data, type_)
    out = np.empty_like(groups)
    _group_meta(type_, out)[:] = _rows_meta(type_, groups)
    moves = _moves(type_)
    base, interleaved = _places(type_, n_cols)
    orders = moves.from_base(base, interleaved)
    _regroup(read_only(groups), orders, n_cols // moves.cell_elems, moves.bits, out)
    return _recoded(type_, out, _CODED).reshape(data.shape)


@cache
def decoder(name: str) -> Decode:
    """Return the decoder of an interleaved type, given its name."""
    type_ = by_name(name)
    decode_base = get_decoder(INTERLEAVED[name])

    def decode(data: Bytes, n_cols: int) -> Floats32:
        return decode_base(to_base(type_, data, n_cols), n_cols)

    return decode


@cache
def codec(name: str) -> QuantFormat:
    """Return the codec of the interleaved type of that name, whose base type has one."""
    type_ = by_name(name)
    base = get_format(REGROUPED[name])

    def encode(rows: Rows, weighting: Weighting | None) -> Bytes:
        check_rows(rows, weighting, type_)
        try:
            data = base.encode(rows, weighting)
        except BlockRefused as error:
            raise BlockRefused(name, error.row, error.what) from error
        return from_base(type_, data, rows.shape[1])

    return InterleavedFormat(type_, encode, get_decoder(name))


class InterleavedFormat(QuantFormat):
    """The codec of an interleaved type; that of its base type has looked at the scales."""

    def encode(self, rows: Rows, weighting: Weighting | None) -> Bytes:
        return self.make(rows, weighting)


def _check(type_: GGMLType, data: Bytes, n_cols: int) -> None:
    check_data(data, n_cols, type_)
    cell_elems = GROUP_LAYOUTS[type_.name].cell_elems
    if cell_elems and n_cols % cell_elems:
        raise ShapeError(f"{type_.name}: row length {n_cols} is not a multiple of {cell_elems}")


def _group_meta(type_: GGMLType, groups: Bytes) -> Bytes:
    """Return the bytes in front of groups, a view (n_groups, rows, bytes)."""
    meta = type_.row_meta_bytes
    return groups[:, : type_.rows_interleaved * meta].reshape(len(groups), type_.rows_interleaved, meta)


def _rows_meta(type_: GGMLType, groups: Bytes) -> Bytes:
    """Return the bytes in front of the base type's rows, a view of the same shape."""
    rows = groups.reshape(len(groups), type_.rows_interleaved, groups.shape[1] // type_.rows_interleaved)
    return rows[:, :, : type_.row_meta_bytes]


def _recoded(type_: GGMLType, groups: Bytes, table: Bytes) -> Bytes:
    """Return groups of the interleaved type with the bytes that have signs looked up in `table`."""
    signs = GROUP_LAYOUTS[type_.name].signs
    if signs is None:
        return groups
    groups = groups.copy()
    block_bytes = type_.rows_interleaved * type_.block_bytes
    blocks = groups.reshape(len(groups), groups.shape[1] // block_bytes, block_bytes)
    start, stop, step = signs
    blocks[:, :, start:stop:step] = table[blocks[:, :, start:stop:step]]
    return groups


@dataclass(frozen=True)
class _Places:
    """Where the cells of one side of a regrouping are: byte i of row k of cell c, in a group.

    row    bytes from a row to the next; 0 where the rows of a cell are in one run of bytes
    start  byte of the first cell
    step   bytes from a cell to the next
    """

    row: int
    start: int
    step: int


def _places(type_: GGMLType, n_cols: int) -> tuple[_Places, _Places]:
    """Return the places in groups of the base type and in those of the interleaved type."""
    group, meta, cell_bytes = type_.rows_interleaved, type_.row_meta_bytes, _cell_bytes(type_)
    return (_Places(type_.row_bytes(n_cols), meta, cell_bytes), _Places(0, group * meta, group * cell_bytes))


def _cell_bytes(type_: GGMLType) -> int:
    cell_elems = GROUP_LAYOUTS[type_.name].cell_elems or type_.block_elems
    return cell_elems // type_.block_elems * type_.block_bytes


Integers = npt.NDArray[np.int64]


class _Orders(NamedTuple):
    """Byte places[i] of a cell gets the units u at byte picks[i, u], bit shifts[i, u].

    read_step, write_step  bytes from a cell to the next
    """

    picks: Integers
    shifts: Integers
    read_step: int
    places: Integers
    write_step: int


@dataclass(frozen=True, eq=False)
class _Moves:
    """The permutation of a cell: unit i of the base type is unit forward[i] of the interleaved type.

    bits        of a unit
    cell_bytes  bytes of a cell of one row
    backward    the inverse of `forward`
    """

    bits: int
    cell_elems: int
    cell_bytes: int
    forward: Integers
    backward: Integers

    def to_base(self, base: _Places, interleaved: _Places) -> _Orders:
        picks, shifts = self._picks(self.forward)
        return _Orders(interleaved.start + picks, shifts, interleaved.step, self._base_bytes(base), base.step)

    def from_base(self, base: _Places, interleaved: _Places) -> _Orders:
        picks, shifts = self._picks(self.backward)
        places = interleaved.start + np.arange(len(picks))
        return _Orders(self._base_bytes(base)[picks], shifts, base.step, places, interleaved.step)

    def _picks(self, order: Integers) -> tuple[Integers, Integers]:
        """Return the byte and the first bit in it of the units of each byte, (n_bytes, units of a byte)."""
        first = order.reshape(-1, 8 // self.bits) * self.bits
        return np.ascontiguousarray(first // 8), np.ascontiguousarray(first % 8)

    def _base_bytes(self, base: _Places) -> Integers:
        row, byte = np.divmod(np.arange(len(self.forward) * self.bits // 8), self.cell_bytes)
        return base.start + row * base.row + byte


@cache
def _moves(type_: GGMLType) -> _Moves:
    layout, cell_bytes = GROUP_LAYOUTS[type_.name], _cell_bytes(type_)
    cell_elems = layout.cell_elems or type_.block_elems
    base = base_layout(base_of(type_), cell_elems)
    forward = np.full(8 * cell_bytes * type_.rows_interleaved, -1)
    for k in range(type_.rows_interleaved):
        row = layout.interleaved(k)
        for name, positions in base.items():
            forward[8 * cell_bytes * k + positions.ravel()] = row[name].ravel()
    bits = next(n for n in (8, 4, 2, 1) if _moves_together(forward, n))
    units = forward[::bits] // bits
    return _Moves(bits, cell_elems, cell_bytes, units, np.argsort(units))


def _moves_together(forward: Integers, bits: int) -> bool:
    """Whether all units of so many bits stay whole."""
    first = forward[::bits]
    whole = (first[:, np.newaxis] + np.arange(bits)).reshape(-1)
    return not (first % bits).any() and np.array_equal(whole, forward)


@kernel
def _regroup(groups: Bytes, orders: _Orders, n_cells: int, bits: int, out: Bytes) -> None:
    """Fill `out` with units of so many bits."""
    picks, shifts, read_step, places, write_step = orders
    mask = (1 << bits) - 1
    for group in range(len(groups)):
        for cell in range(n_cells):
            for i in range(len(places)):
                value = 0
                for u in range(picks.shape[1]):
                    unit = groups[group, picks[i, u] + cell * read_step] >> shifts[i, u] & mask
                    value |= unit << bits * u
                out[group, places[i] + cell * write_step] = value
