"""Single items of lanes, and what brings many lanes to one value: for work that differs from lane to lane.

    item, put_item            one lane of one vector of a Tile, read or written as a scalar
    mask_word, lowest_bit     a Mask as an integer, and the number of its first lane: loops over some lanes
    least                     the smallest of all lanes
    look_up                   a small table, held by a vector, indexed lane by lane
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from quantize.formats.lane_memory import TileType
from quantize.formats.lanes import FLOATS, INTS, LANES, WORD, is_integer, is_lanes, operation

TABLE_SIZE = 8
"""Items of a table for `look_up`."""

_SCALARS = {"float32": types.float32, "int32": types.int32}


def _item_pointer(builder: Any, tile: Any, index: Any, lane: Any) -> Any:
    vector = builder.gep(tile, [index])
    first = builder.bitcast(vector, vector.type.pointee.element.as_pointer())
    return builder.gep(first, [lane])


@operation
def item(_context: Any, tile: Any, index: Any, lane: Any) -> Any:
    """Return lane number `lane` of tile[index] as a scalar."""
    if not isinstance(tile, TileType) or not is_integer(index) or not is_integer(lane):
        return None
    signature = _SCALARS[tile.item.kind](tile, types.intp, types.intp)
    return signature, lambda _ctx, builder, _sig, args: builder.load(_item_pointer(builder, *args))


@operation
def put_item(_context: Any, tile: Any, index: Any, lane: Any, value: Any) -> Any:
    """Write a scalar to lane number `lane` of tile[index]."""
    if not isinstance(tile, TileType) or not is_integer(index) or not is_integer(lane):
        return None

    def emit(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        builder.store(args[3], _item_pointer(builder, *args[:3]))
        return context.get_dummy_value()

    return types.void(tile, types.intp, types.intp, _SCALARS[tile.item.kind]), emit


@operation
def mask_word(_context: Any, mask: Any) -> Any:
    """Return a Mask as an integer: bit k is lane k."""
    if not is_lanes(mask, "mask"):
        return None

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.zext(builder.bitcast(args[0], ir.IntType(mask.count)), ir.IntType(64))

    return types.int64(mask), emit


@operation
def lowest_bit(_context: Any, word: Any) -> Any:
    """Return the number of the lowest bit that is set in an integer other than 0."""
    if not is_integer(word):
        return None
    signature = types.int64(types.int64)
    return signature, lambda _ctx, builder, _sig, args: builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))


@operation
def least(_context: Any, value: Any) -> Any:
    """Return the smallest lane of Floats, none of them NaN, or of Ints, as a scalar."""
    if not is_lanes(value, "float32", "int32"):
        return None

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        rest = args[0]
        compare = builder.fcmp_ordered if value.kind == "float32" else builder.icmp_signed
        step = value.count // 2
        while step:
            order = [min(k + step, value.count - 1) for k in range(value.count)]
            other = builder.shuffle_vector(rest, rest, ir.Constant(ir.VectorType(WORD, value.count), order))
            rest = builder.select(compare("<", rest, other), rest, other)
            step //= 2
        return builder.extract_element(rest, ir.Constant(WORD, 0))

    return _SCALARS[value.kind](value), emit


@operation
def look_up(_context: Any, table: Any, index: Any) -> Any:
    """Return, per lane, item number `index & 7` of a table.

    table   Floats: lanes 0 .. 7 hold its items, and lanes 8 .. 15 hold them again
    """
    if table != FLOATS or index != INTS:
        return None

    def emit(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        features = context.codegen().magic_tuple()[-1].split(",")
        if "+avx512f" in features:
            return _call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS.vector, args)
        if "+avx2" in features:
            return _look_up_by_halves(builder, *args)
        return _look_up_by_selects(builder, *args)

    return table(table, index), emit


def _call(builder: Any, name: str, result: Any, args: Any) -> Any:
    signature = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def _lanes_of(builder: Any, value: Any, lanes: list[int]) -> Any:
    """Return some lanes of a vector as a vector of their own."""
    order = ir.Constant(ir.VectorType(WORD, len(lanes)), lanes)
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), order)


def _look_up_by_halves(builder: Any, table: Any, index: Any) -> Any:
    items = _lanes_of(builder, table, list(range(TABLE_SIZE)))
    halves = [
        _call(
            builder,
            "llvm.x86.avx2.permps",
            items.type,
            [items, _lanes_of(builder, index, list(range(start, start + TABLE_SIZE)))],
        )
        for start in range(0, LANES, TABLE_SIZE)
    ]
    return builder.shuffle_vector(*halves, ir.Constant(INTS.vector, list(range(LANES))))


def _look_up_by_selects(builder: Any, table: Any, index: Any) -> Any:
    """Return the same on any processor: three rounds that each halve the choice by one bit of the index."""
    choices = [_lanes_of(builder, table, [k] * LANES) for k in range(TABLE_SIZE)]
    for bit in range(3):
        ones = builder.and_(index, INTS.constant([1 << bit] * LANES))
        odd = builder.icmp_signed("!=", ones, INTS.constant([0] * LANES))
        pairs = zip(choices[::2], choices[1::2], strict=True)
        choices = [builder.select(odd, high, low) for low, high in pairs]
    return choices[0]
