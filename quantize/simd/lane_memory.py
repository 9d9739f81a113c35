"""The memory of lanes: arrays, read and written LANES items at a time, and Tiles.

    Tile    n Floats or n Ints on the kernel's stack: tile[i], tile[i] = lanes, tail(tile, start)

A Tile is what a local array is in scalar code. Bounds are never checked.

`beside` shows two stretches of a Tile as one of vectors twice as wide, so that the same code works on two
sub-blocks at once; applied to its own result, on four.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import lower_builtin, models, register_model, type_callable

from quantize.simd.lanes import (
    FLOATS,
    INTS,
    LANES,
    WORD,
    LaneType,
    broadcast,
    constant_operation,
    is_integer,
    operation,
)

# What type checkers see of these and of the operations below is in lane_memory.pyi.
Tile = Any
FloatTile = Any
IntTile = Any


class TileType(types.Type):
    """The numba type of a Tile of `item`s: a pointer to its first vector."""

    def __init__(self, item: LaneType) -> None:
        self.item = item
        super().__init__(name=f"tile({item.name})")


class BesideType(types.Type):
    """The numba type of two stretches, of a TileType or BesideType `single`, side by side."""

    def __init__(self, single: TileType | BesideType) -> None:
        self.single = single
        self.item: LaneType = LaneType(single.item.kind, 2 * single.item.count)
        super().__init__(name=f"beside({single.name})")


@register_model(TileType)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager: Any, tile_type: TileType) -> None:
        super().__init__(manager, tile_type, tile_type.item.vector.as_pointer())


@register_model(BesideType)
class _BesideModel(models.StructModel):
    def __init__(self, manager: Any, beside_type: BesideType) -> None:
        super().__init__(manager, beside_type, [("single", beside_type.single), ("distance", types.intp)])


def _is_tile(type_: Any) -> bool:
    return isinstance(type_, (TileType, BesideType))


# ---- tiles -----------------------------------------------------------------------------------------


def _allocate(builder: Any, item: LaneType, count: Any) -> Any:
    return cgutils.alloca_once(builder, item.vector, size=count.literal_value)


def new_tile(item: LaneType, count: Any) -> Any:
    """Return signature and code of an operation that makes a Tile of `count` vectors, a constant."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    return TileType(item)(count), lambda _ctx, builder, _sig, _args: _allocate(builder, item, count)


@constant_operation
def float_tile(_context: Any, count: Any) -> Any:
    """Return an uninitialised Tile of `count` Floats, a constant; it lives until the function returns."""
    return new_tile(FLOATS, count)


@constant_operation
def int_tile(_context: Any, count: Any) -> Any:
    """Return an uninitialised Tile of `count` Ints, a constant; it lives until the function returns."""
    return new_tile(INTS, count)


@constant_operation
def tile_like(_context: Any, tile: Any, count: Any) -> Any:
    """Return an uninitialised Tile of `count` vectors, a constant, of the type that `tile` holds."""
    if not _is_tile(tile) or not isinstance(count, types.IntegerLiteral):
        return None
    signature = TileType(tile.item)(tile, count)
    return signature, lambda _ctx, builder, _sig, _args: _allocate(builder, tile.item, count)


@operation
def zero_like(_context: Any, tile: Any) -> Any:
    """Return lanes that all hold 0, of the type that `tile` holds."""
    if not _is_tile(tile):
        return None
    return tile.item(tile), lambda _ctx, _builder, _sig, _args: tile.item.constant([0] * tile.item.count)


@operation
def tail(_context: Any, tile: Any, start: Any) -> Any:
    """Return the Tile that begins at tile[start]; both share their vectors."""
    if not isinstance(tile, TileType) or not is_integer(start):
        return None
    return tile(tile, types.intp), lambda _ctx, builder, _sig, args: builder.gep(args[0], [args[1]])


@operation
def beside(_context: Any, tile: Any, distance: Any) -> Any:
    """Return the Tile whose vector i is tile[i] followed by tile[i + distance]; it shares their memory."""
    if not _is_tile(tile) or not is_integer(distance):
        return None
    result = BesideType(tile)

    def emit(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        pair = cgutils.create_struct_proxy(result)(context, builder)
        pair.single, pair.distance = args
        return pair._getvalue()

    return result(tile, types.intp), emit


@type_callable(operator.getitem)
def _type_getitem(_context: Any) -> Any:
    return lambda tile, index: tile.item if _is_tile(tile) and is_integer(index) else None


@type_callable(operator.setitem)
def _type_setitem(_context: Any) -> Any:
    def type_of(tile: Any, index: Any, value: Any) -> Any:
        return types.none if _is_tile(tile) and is_integer(index) and value == tile.item else None

    return type_of


@lower_builtin(operator.getitem, TileType, types.Integer)
@lower_builtin(operator.getitem, BesideType, types.Integer)
def _lower_getitem(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    index = context.cast(builder, args[1], signature.args[1], types.intp)
    return _read(context, builder, signature.args[0], args[0], index)


@lower_builtin(operator.setitem, TileType, types.Integer, LaneType)
@lower_builtin(operator.setitem, BesideType, types.Integer, LaneType)
def _lower_setitem(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    index = context.cast(builder, args[1], signature.args[1], types.intp)
    _write(context, builder, signature.args[0], args[0], index, args[2])
    return context.get_dummy_value()


def _read(context: Any, builder: Any, type_: Any, tile: Any, index: Any) -> Any:
    """Return LLVM code for tile[index]."""
    if isinstance(type_, TileType):
        return builder.load(builder.gep(tile, [index]))
    pair = cgutils.create_struct_proxy(type_)(context, builder, value=tile)
    first = _read(context, builder, type_.single, pair.single, index)
    second = _read(context, builder, type_.single, pair.single, builder.add(index, pair.distance))
    return builder.shuffle_vector(first, second, _lane_list(range(type_.item.count)))


def _write(
    context: Any, builder: Any, type_: TileType | BesideType, tile: Any, index: Any, value: Any
) -> None:
    """Emit LLVM code for tile[index] = value."""
    if isinstance(type_, TileType):
        builder.store(value, builder.gep(tile, [index]))
        return
    pair = cgutils.create_struct_proxy(type_)(context, builder, value=tile)
    half = type_.single.item.count
    nothing = type_.item.constant(ir.Undefined)
    first = builder.shuffle_vector(value, nothing, _lane_list(range(half)))
    second = builder.shuffle_vector(value, nothing, _lane_list(range(half, 2 * half)))
    _write(context, builder, type_.single, pair.single, index, first)
    _write(context, builder, type_.single, pair.single, builder.add(index, pair.distance), second)


def _lane_list(lanes: range) -> ir.Constant:
    return ir.Constant(ir.VectorType(WORD, len(lanes)), list(lanes))


# ---- arrays ----------------------------------------------------------------------------------------


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
    """Return array[index : index + LANES] of a one-dimensional array.

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
    """Write lanes to array[index : index + LANES]."""
    if value != _array_lanes(array) or not is_integer(index):
        return None

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = item_pointer(context, builder, sig.args[0], args[0], args[1])
        stored = builder.store(args[2], builder.bitcast(pointer, sig.args[2].vector.as_pointer()))
        stored.align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, value), emit


def _gathered(builder: Any, lanes: LaneType, base: Any, places: Any) -> Any:
    """Return LLVM code for base[place] per lane; items of 4 bytes."""
    wide = ir.VectorType(ir.IntType(64), LANES)
    start = broadcast(builder, builder.ptrtoint(base, ir.IntType(64)), LANES)
    steps = builder.mul(builder.sext(places, wide), ir.Constant(wide, [4] * LANES))
    pointers = builder.inttoptr(builder.add(start, steps), ir.VectorType(base.type, LANES))
    everywhere = LaneType("mask", LANES).constant([1] * LANES)
    signature = ir.FunctionType(lanes.vector, [pointers.type, WORD, everywhere.type, lanes.vector])
    kind = "f32" if lanes == FLOATS else "i32"
    name = f"llvm.masked.gather.v{LANES}{kind}.v{LANES}p0"
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    alignment, nothing = ir.Constant(WORD, 4), lanes.constant(ir.Undefined)
    return builder.call(function, [pointers, alignment, everywhere, nothing])


@operation
def gather(_context: Any, array: Any, index: Any) -> Any:
    """Return array[index[lane]] per lane, for a one-dimensional float32 or int32 array."""
    lanes = _array_lanes(array)
    if lanes is None or index != INTS:
        return None

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        base = context.make_array(sig.args[0])(context, builder, args[0]).data
        return _gathered(builder, lanes, base, args[1])

    return lanes(array, index), emit


@operation
def pick(_context: Any, tile: Any, index: Any) -> Any:
    """Return, per lane, that lane of tile[index[lane]]."""
    if tile not in (TileType(FLOATS), TileType(INTS)) or index != INTS:
        return None

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        places = builder.add(
            builder.mul(args[1], INTS.constant([LANES] * LANES)), INTS.constant(list(range(LANES)))
        )
        first = builder.bitcast(args[0], args[0].type.pointee.element.as_pointer())
        return _gathered(builder, tile.item, first, places)

    return tile.item(tile, index), emit
