"""Look-ups in tables of 16 to 128 floats that every lane shares.

With AVX-512, registers hold the table, and a look-up is one permutation for each 16 or 32 items. Elsewhere
lanes load their items one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from quantize.simd.lane_memory import item_pointer
from quantize.simd.lanes import FLOATS, INTS, LANES, WORD


def _constant_operation(definition: Callable[..., Any]) -> Any:
    """Return an operation that sees the values of constant arguments."""
    return intrinsic(prefer_literal=True)(definition)


@_constant_operation
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
