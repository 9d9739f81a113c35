"""Single items of lanes, and reductions of many lanes to one value, for work that differs from lane to lane.

item, put_item            one lane of one vector of a Tile, read or written as a scalar
mask_word, lowest_bit     a Mask as an integer, and the number of its first lane: loops over some lanes
least                     the smallest of all lanes
halves_swapped            the lower lanes above the upper ones, to put one half beside the other
look_up                   a small table, held by a vector, indexed lane by lane
look_up_in                a table of 16 to 128 floats that every lane shares. With AVX-512, registers hold the
                          table, and a look-up is one permutation for each 16 or 32 items. Elsewhere lanes
                          load their items one by one

pair_..., byte_...        lanes as pairs of 16-bit integers, or as four bytes: more numbers per vector, where
                          few bits are enough. Both travel as Ints, so they are loaded, kept in tiles and
                          copied to all lanes as any Ints. The first number is in the lowest bits. Results are
                          exact integers, so no target rounds differently. Each operation is one instruction
                          of baseline x86-64, except for norms, which are two at most
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from quantize.simd.lane_memory import TileType, item_pointer
from quantize.simd.lanes import FLOATS, INTS, LANES, WORD, constant_operation, is_integer, is_lanes, operation

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


_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_WIDE = ir.VectorType(WORD, 2 * LANES)


def _binary(left: Any, right: Any, vector: ir.VectorType, emit_parts: Any) -> Any:
    """Return the definition of an operation on two Ints, seen as vectors of smaller integers."""
    if left != INTS or right != INTS:
        return None

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        parts = (builder.bitcast(arg, vector) for arg in args)
        return builder.bitcast(emit_parts(builder, *parts), INTS.vector)

    return INTS(left, right), emit


@operation
def pair_product(_context: Any, left: Any, right: Any) -> Any:
    """Return the products of signed halves divided by 65536, rounded down."""

    def emit(builder: Any, x: Any, y: Any) -> Any:
        # LLVM knows this as one instruction; of halves without a sign it may not
        product = builder.mul(builder.sext(x, _WIDE), builder.sext(y, _WIDE))
        return builder.trunc(builder.lshr(product, ir.Constant(_WIDE, [16] * (2 * LANES))), _HALVES)

    return _binary(left, right, _HALVES, emit)


@operation
def pair_difference(_context: Any, left: Any, right: Any) -> Any:
    """Return left - right of halves, modulo 65536."""
    return _binary(left, right, _HALVES, lambda builder, x, y: builder.sub(x, y))


@operation
def byte_excess(_context: Any, left: Any, right: Any) -> Any:
    """Return by how much bytes of left, without a sign, exceed those of right; 0 where they don't."""

    def emit(builder: Any, x: Any, y: Any) -> Any:
        signature = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
        name = f"llvm.usub.sat.v{4 * LANES}i8"
        return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), [x, y])

    return _binary(left, right, _BYTES, emit)


@operation
def pair_norm(_context: Any, value: Any) -> Any:
    """Return, per lane, the sum of the squares of its two signed halves, modulo 2**32."""
    if value != INTS:
        return None

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        halves = builder.sext(builder.bitcast(args[0], _HALVES), _WIDE)
        squares = builder.mul(halves, halves)
        nothing = ir.Constant(_WIDE, ir.Undefined)
        parts = []
        for first in (0, 1):
            order = ir.Constant(INTS.vector, list(range(first, 2 * LANES, 2)))
            parts.append(builder.shuffle_vector(squares, nothing, order))
        return builder.add(*parts)

    return INTS(value), emit


@constant_operation
def look_up_in(_context: Any, array: Any, size: Any, index: Any) -> Any:
    """Return array[index & size - 1] per lane, for a float32 array of `size` items, a constant: 16 .. 128."""
    if not isinstance(size, types.IntegerLiteral) or size.literal_value not in (16, 32, 64, 128):
        return None
    if not isinstance(array, types.Array) or array.dtype != types.float32 or index != INTS:
        return None
    count = size.literal_value

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        table = item_pointer(context, builder, sig.args[0], args[0], ir.Constant(ir.IntType(64), 0))
        if "+avx512f" in context.codegen().magic_tuple()[-1].split(","):
            return _permuted(builder, table, count, args[2])
        within = builder.and_(args[2], INTS.constant([count - 1] * LANES))
        items = FLOATS.constant(ir.Undefined)
        for k in range(LANES):
            lane = ir.Constant(WORD, k)
            place = builder.gep(table, [builder.extract_element(within, lane)])
            items = builder.insert_element(items, builder.load(place), lane)
        return items

    return FLOATS(array, size, index), emit


def _permuted(builder: Any, table: Any, count: int, index: Any) -> Any:
    """Return LLVM code for table[index]; the instructions take only the bits of the index that they need."""
    registers = []
    for first in range(0, count, LANES):
        place = builder.gep(table, [ir.Constant(ir.IntType(64), first)])
        register = builder.load(builder.bitcast(place, FLOATS.vector.as_pointer()))
        register.align = 4
        registers.append(register)
    if count == LANES:
        signature = ir.FunctionType(FLOATS.vector, [FLOATS.vector, INTS.vector])
        permute = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512.permvar.sf.512")
        return builder.call(permute, [registers[0], index])
    signature = ir.FunctionType(FLOATS.vector, [FLOATS.vector, INTS.vector, FLOATS.vector])
    permute = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512.vpermi2var.ps.512")
    pairs = zip(registers[::2], registers[1::2], strict=True)
    parts = [builder.call(permute, [low, index, high]) for low, high in pairs]
    bit = 2 * LANES
    while len(parts) > 1:  # the next bit of the index chooses between neighbours
        is_set = builder.icmp_signed(
            "!=", builder.and_(index, INTS.constant([bit] * LANES)), INTS.constant([0] * LANES)
        )
        parts = [builder.select(is_set, high, low) for low, high in zip(parts[::2], parts[1::2], strict=True)]
        bit *= 2
    return parts[0]
