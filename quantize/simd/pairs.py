"""Lanes as pairs of 16-bit integers, or as four bytes: more numbers per vector, where few bits are enough.

Both travel as Ints, so they are loaded, kept in tiles and copied to all lanes as any Ints. The first number
is in the lowest bits. Results are exact integers, so no target rounds differently. Each operation is one
instruction of baseline x86-64, except for norms, which are two at most.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from quantize.simd.lanes import INTS, LANES, WORD, operation

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
