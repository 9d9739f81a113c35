"""Where lanes live: arrays, read and written LANES items at a time, and Tiles.

    Tile    n Floats or n Ints on the kernel's stack: tile[i], tile[i] = lanes, tail(tile, start)

A Tile is what a local array is in scalar code. Bounds are never checked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

from quantize.formats.lanes import FLOATS, I1, INTS, LANES, WORD, LaneType, broadcast, is_integer, operation

Tile = Any


class TileType(types.Type):
    """The numba type of a Tile of `item`s: a pointer to its first vector."""

    def __init__(self, item: LaneType) -> None:
        self.item = item
        super().__init__(name=f"tile({item.name})")


FLOAT_TILE = TileType(FLOATS)
INT_TILE = TileType(INTS)


@register_model(TileType)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager: Any, tile_type: TileType) -> None:
        super().__init__(manager, tile_type, tile_type.item.vector.as_pointer())


def _constant_operation(definition: Callable[..., Any]) -> Any:
    """Return an operation that sees the values of constant arguments."""
    return intrinsic(prefer_literal=True)(definition)


def _array_lanes(array: Any) -> LaneType | None:
    """Return the lane type that an array's items load as."""
    if not isinstance(array, types.Array) or array.ndim != 1 or array.layout != "C":
        return None
    return {types.float32: FLOATS, types.int32: INTS}.get(array.dtype)


def item_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Return LLVM code for the address of array[index] in a one-dimensional C array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


@operation
def load(_context: Any, array: Any, index: Any) -> Any:
    """Return array[index : index + LANES] of a one-dimensional array; bounds unchecked.

    float32 gives Floats, integers of up to 32 bits give Ints, widened with their sign if they have one.
    """
    item: Any = array.dtype if isinstance(array, types.Array) else None
    narrow = is_integer(item) and item.bitwidth < 32
    lanes = INTS if narrow and array.ndim == 1 and array.layout == "C" else _array_lanes(array)
    if lanes is None or not is_integer(index):
        return None

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = item_pointer(context, builder, sig.args[0], *args)
        vector = ir.VectorType(ir.IntType(item.bitwidth), LANES) if narrow else lanes.vector
        loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
        loaded.align = item.bitwidth // 8
        if not narrow:
            return loaded
        return builder.sext(loaded, lanes.vector) if item.signed else builder.zext(loaded, lanes.vector)

    return lanes(array, types.intp), emit


@operation
def store(_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Write lanes to array[index : index + LANES]; bounds unchecked."""
    if value != _array_lanes(array) or not is_integer(index):
        return None

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = item_pointer(context, builder, sig.args[0], args[0], args[1])
        stored = builder.store(args[2], builder.bitcast(pointer, sig.args[2].vector.as_pointer()))
        stored.align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, value), emit


@operation
def gather(_context: Any, array: Any, index: Any) -> Any:
    """Return array[index[lane]] per lane, for a one-dimensional float32 or int32 array; bounds unchecked."""
    lanes = _array_lanes(array)
    if lanes is None or index != INTS:
        return None

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = ir.VectorType(ir.IntType(64), LANES)
        base = context.make_array(sig.args[0])(context, builder, args[0]).data
        start = broadcast(builder, builder.ptrtoint(base, ir.IntType(64)))
        steps = builder.mul(builder.sext(args[1], wide), ir.Constant(wide, [4] * LANES))
        pointers = builder.inttoptr(builder.add(start, steps), ir.VectorType(base.type, LANES))
        kind = "f32" if lanes == FLOATS else "i32"
        signature = ir.FunctionType(lanes.vector, [pointers.type, WORD, I1, lanes.vector])
        name = f"llvm.masked.gather.v{LANES}{kind}.v{LANES}p0"
        function = cgutils.get_or_insert_function(builder.module, signature, name)
        everywhere = ir.Constant(I1, [1] * LANES)
        nothing = ir.Constant(lanes.vector, ir.Undefined)
        return builder.call(function, [pointers, ir.Constant(WORD, 4), everywhere, nothing])

    return lanes(array, index), emit


def _new_tile(tile: TileType, count: Any) -> Any:
    if not isinstance(count, types.IntegerLiteral):
        return None

    def emit(_ctx: Any, builder: Any, _sig: Any, _args: Any) -> Any:
        return cgutils.alloca_once(builder, tile.item.vector, size=count.literal_value)

    return tile(count), emit


@_constant_operation
def float_tile(_context: Any, count: Any) -> Any:
    """Return an uninitialised Tile of `count` Floats, a constant; it lives until the function returns."""
    return _new_tile(FLOAT_TILE, count)


@_constant_operation
def int_tile(_context: Any, count: Any) -> Any:
    """Return an uninitialised Tile of `count` Ints, a constant; it lives until the function returns."""
    return _new_tile(INT_TILE, count)


@operation
def tail(_context: Any, tile: Any, start: Any) -> Any:
    """Return the Tile that begins at tile[start]; both share their vectors."""
    if not isinstance(tile, TileType) or not is_integer(start):
        return None
    return tile(tile, types.intp), lambda _ctx, builder, _sig, args: builder.gep(args[0], [args[1]])


@type_callable(operator.getitem)
def _type_getitem(_context: Any) -> Any:
    def type_of(tile: Any, index: Any) -> Any:
        return tile.item if isinstance(tile, TileType) and is_integer(index) else None

    return type_of


@lower_builtin(operator.getitem, TileType, types.Integer)
def _lower_getitem(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    index = context.cast(builder, args[1], signature.args[1], types.intp)
    return builder.load(builder.gep(args[0], [index]))


@type_callable(operator.setitem)
def _type_setitem(_context: Any) -> Any:
    def type_of(tile: Any, index: Any, value: Any) -> Any:
        fits = isinstance(tile, TileType) and is_integer(index) and value == tile.item
        return types.none if fits else None

    return type_of


@lower_builtin(operator.setitem, TileType, types.Integer, LaneType)
def _lower_setitem(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    index = context.cast(builder, args[1], signature.args[1], types.intp)
    builder.store(args[2], builder.gep(args[0], [index]))
    return context.get_dummy_value()
