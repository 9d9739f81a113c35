"""Vectors of 8 lanes, for searches that put the few candidates of one group side by side.

They have the operators of `lanes`. An octet of Floats is also a table of 8 items, for `look_up_eight`: one
instruction with AVX2.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from quantize.simd.lane_memory import item_pointer, new_tile
from quantize.simd.lanes import WORD, LaneType, constant_operation, is_integer, operation

EIGHT = 8

_FLOATS = LaneType("float32", EIGHT)
_INTS = LaneType("int32", EIGHT)


@operation
def eight_numbers(_context: Any) -> Any:
    """Return Ints 0, 1, ... 7."""
    return _INTS(), lambda _ctx, _builder, _sig, _args: _INTS.constant(list(range(EIGHT)))


@constant_operation
def float_eights(_context: Any, count: Any) -> Any:
    """Return an uninitialised Tile of `count` octets of Floats, a constant; as `lane_memory.float_tile`."""
    return new_tile(_FLOATS, count)


@constant_operation
def int_eights(_context: Any, count: Any) -> Any:
    """Return an uninitialised Tile of `count` octets of Ints, a constant; as `lane_memory.int_tile`."""
    return new_tile(_INTS, count)


@operation
def load_eight(_context: Any, array: Any, index: Any) -> Any:
    """Return array[index : index + 8] of a one-dimensional uint16 array as Ints."""
    if not isinstance(array, types.Array) or array.dtype != types.uint16 or not is_integer(index):
        return None

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        narrow = ir.VectorType(ir.IntType(16), EIGHT)
        pointer = item_pointer(context, builder, sig.args[0], *args)
        loaded = builder.load(builder.bitcast(pointer, narrow.as_pointer()))
        loaded.align = 2
        return builder.zext(loaded, _INTS.vector)

    return _INTS(array, types.intp), emit


@operation
def look_up_eight(_context: Any, table: Any, index: Any) -> Any:
    """Return, per lane, item number `index & 7` of an octet of Floats."""
    if table != _FLOATS or index != _INTS:
        return None

    def emit(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        # LLVM would find this instruction, but not that it takes the lower three bits of an index by itself
        if "+avx2" in context.codegen().magic_tuple()[-1].split(","):
            signature = ir.FunctionType(_FLOATS.vector, [_FLOATS.vector, _INTS.vector])
            permute = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx2.permps")
            return builder.call(permute, args)
        within = builder.and_(args[1], _INTS.constant([EIGHT - 1] * EIGHT))
        picked = ir.Constant(_FLOATS.vector, ir.Undefined)
        for k in range(EIGHT):  # LLVM knows this chain of extracts and inserts as a permutation
            lane = ir.Constant(WORD, k)
            chosen = builder.extract_element(args[0], builder.extract_element(within, lane))
            picked = builder.insert_element(picked, chosen, lane)
        return picked

    return table(table, index), emit
