"""Single items of lanes, and reductions of many lanes to one value, for work that differs from lane to lane.

item, put_item            one lane of one vector of a Tile, read or written as a scalar
mask_word, lowest_bit     a Mask as an integer, and the number of its first lane: loops over some lanes
least                     the smallest of all lanes
halves_swapped            the lower lanes above the upper ones, to put one half beside the other
look_up                   a small table, held by a vector, indexed lane by lane
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from quantize.simd.lane_memory import TileType
from quantize.simd.lanes import FLOATS, INTS, LANES, WORD, is_integer, is_lanes, operation

TABLE_SIZE = 8
"""Number of items in a table for `look_up`."""

_SCALARS = {"float32": types.float32, "int32": types.int32}


def _item_pointer(builder: Any, tile: Any, index: Any, lane: Any) -> Any:
    vector = builder.gep(tile, [index])
    first = builder.bitcast(vector, vector.type.pointee.element.as_pointer())
    return builder.gep(first, [lane])


@operation
def item(_context: Any, tile: Any, index: Any, lane: Any) -> Any:
    """Return lane number `lane` of tile[index] as a scalar; LANES and above are those of the next vectors."""
    if not isinstance(tile, TileType) or not is_integer(index) or not is_integer(lane):
        return None
    signature = _SCALARS[tile.item.kind](tile, types.intp, types.intp)
    return signature, lambda _ctx, builder, _sig, args: builder.load(_item_pointer(builder, *args))


@operation
def put_item(_context: Any, tile: Any, index: Any, lane: Any, value: Any) -> Any:
    """Write a scalar to lane number `lane` of tile[index], which may be LANES and above as in `item`."""
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
        rest, count = args[0], value.count
        compare = builder.fcmp_ordered if value.kind == "float32" else builder.icmp_signed
        while count > 1:
            count //= 2
            low, high = (_lanes_of(builder, rest, range(k, k + count)) for k in (0, count))
            rest = builder.select(compare("<", low, high), low, high)
        return builder.extract_element(rest, ir.Constant(WORD, 0))

    return _SCALARS[value.kind](value), emit


@operation
def halves_swapped(_context: Any, value: Any) -> Any:
    """Return Floats or Ints with their upper lanes below the lower ones."""
    if not is_lanes(value, "float32", "int32"):
        return None

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        half = value.count // 2
        nothing = ir.Constant(value.vector, ir.Undefined)
        order = ir.Constant(ir.VectorType(WORD, value.count), [*range(half, value.count), *range(half)])
        return builder.shuffle_vector(args[0], nothing, order)

    return value(value), emit


@operation
def look_up(_context: Any, table: Any, index: Any) -> Any:
    """Return, per lane, item number `index & 7` of a table, which lanes 0 .. 7 of Floats hold.

    One instruction with AVX-512, two with AVX2; elsewhere LLVM takes the lanes one by one.
    """
    if table != FLOATS or index != INTS:
        return None

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        items = _lanes_of(builder, args[0], range(TABLE_SIZE))
        within = builder.and_(args[1], INTS.constant([TABLE_SIZE - 1] * LANES))
        halves = []
        for start in range(0, LANES, TABLE_SIZE):
            half = _lanes_of(builder, within, range(start, start + TABLE_SIZE))
            picked = ir.Constant(items.type, ir.Undefined)
            for k in range(TABLE_SIZE):  # LLVM knows this chain of extracts and inserts as a permutation
                lane = ir.Constant(WORD, k)
                chosen = builder.extract_element(items, builder.extract_element(half, lane))
                picked = builder.insert_element(picked, chosen, lane)
            halves.append(picked)
        return builder.shuffle_vector(*halves, ir.Constant(INTS.vector, list(range(LANES))))

    return table(table, index), emit


def _lanes_of(builder: Any, value: Any, lanes: range) -> Any:
    """Return some lanes of a vector as a vector of their own."""
    order = ir.Constant(ir.VectorType(WORD, len(lanes)), list(lanes))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), order)
