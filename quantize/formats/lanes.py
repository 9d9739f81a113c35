"""SIMD vectors as numba types: one value per lane, so that a kernel reads like the scalar arithmetic it is.

    Floats   LANES float32           + - * / and comparisons, with Floats or a scalar float32
    Ints     LANES int32             + - * & | ^ << >> and comparisons, with Ints or a scalar integer
    Mask     LANES booleans          & | ~

A lane never branches: `select` chooses between two results that were both computed. Every operation is the
IEEE one of its scalar twin, in the order written: no flag allows LLVM to reassociate or to fuse a product
with a sum. So a lane holds what scalar C compiled without such flags would hold.

LANES is 16, an AVX-512 register. Other targets get the same code: LLVM splits a vector into as many
registers as it takes (2 for AVX2, 4 for SSE2 and NEON), and more independent registers hide latency.
A scalar operand must be float32: a bare literal is float64 in numba, and is refused here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

LANES = 16

Floats = Any
Ints = Any
Mask = Any

F32 = ir.VectorType(ir.FloatType(), LANES)
I32 = ir.VectorType(ir.IntType(32), LANES)
I1 = ir.VectorType(ir.IntType(1), LANES)
WORD = ir.IntType(32)


def operation(definition: Callable[..., Any]) -> Any:
    """Return numba's intrinsic of `definition`, which names argument and result types and emits LLVM code."""
    return intrinsic(definition)


class LaneType(types.Type):
    """The numba type of a vector; `vector` is its LLVM type."""

    def __init__(self, name: str, vector: ir.VectorType) -> None:
        self.vector = vector
        super().__init__(name=name)


FLOATS = LaneType(f"float32x{LANES}", F32)
INTS = LaneType(f"int32x{LANES}", I32)
MASK = LaneType(f"mask{LANES}", I1)


@register_model(LaneType)
class _LaneModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lane_type: LaneType) -> None:
        super().__init__(manager, lane_type, lane_type.vector)


# ---- operators -------------------------------------------------------------------------------------


def broadcast(builder: Any, value: Any) -> Any:
    """Return LLVM code that copies a scalar to all lanes."""
    vector = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(WORD, 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(I32, [0] * LANES))


def is_integer(type_: Any) -> bool:
    return isinstance(type_, types.Integer)


def _to_word(builder: Any, value: Any, signed: bool) -> Any:
    """Return a scalar integer of any width as 32 bits, the upper ones dropped."""
    if value.type.width > 32:
        return builder.trunc(value, WORD)
    if value.type.width < 32:
        return builder.sext(value, WORD) if signed else builder.zext(value, WORD)
    return value


def _widen(builder: Any, type_: Any, value: Any) -> Any:
    """Return an operand as a vector: lanes as they are, a scalar copied to all of them."""
    if isinstance(type_, LaneType):
        return value
    if is_integer(type_):
        value = _to_word(builder, value, type_.signed)
    return broadcast(builder, value)


def _pair(left: Any, right: Any) -> LaneType | None:
    """Return the lane type in which two operands meet, or None if they don't."""
    for lanes, other in ((left, right), (right, left)):
        if lanes == FLOATS and other in (FLOATS, types.float32):
            return FLOATS
        if lanes == INTS and (other == INTS or is_integer(other)):
            return INTS
    return MASK if left == right == MASK else None


Emit = Callable[[Any, Any, Any], Any]


def _define(symbols: tuple[Any, ...], emit: dict[LaneType, Emit], result: LaneType | None = None) -> None:
    """Teach numba binary operators on lanes: emit[lane type](builder, a, b), result type as the operands'."""

    def type_of(left: Any, right: Any) -> Any:
        meet = _pair(left, right)
        return (result or meet) if meet in emit else None

    def typer(_context: Any) -> Any:
        return type_of

    def lower(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, right = (_widen(builder, t, v) for t, v in zip(signature.args, args, strict=True))
        meet = _pair(*signature.args)
        assert meet is not None  # type_of has admitted these operands
        return emit[meet](builder, left, right)

    scalars = {FLOATS: types.float32, INTS: types.Integer}
    for symbol in symbols:
        type_callable(symbol)(typer)
        for lanes in emit:
            lower_builtin(symbol, lanes, lanes)(lower)
            if lanes in scalars:
                lower_builtin(symbol, lanes, scalars[lanes])(lower)
                lower_builtin(symbol, scalars[lanes], lanes)(lower)


def _compare(symbol: str) -> dict[LaneType, Emit]:
    # != must hold for NaN, all other comparisons must fail, as in C
    floats = "fcmp_unordered" if symbol == "!=" else "fcmp_ordered"
    return {
        FLOATS: lambda b, x, y: getattr(b, floats)(symbol, x, y),
        INTS: lambda b, x, y: b.icmp_signed(symbol, x, y),
    }


_define(
    (operator.add, operator.iadd),
    {FLOATS: lambda b, x, y: b.fadd(x, y), INTS: lambda b, x, y: b.add(x, y)},
)
_define(
    (operator.sub, operator.isub),
    {FLOATS: lambda b, x, y: b.fsub(x, y), INTS: lambda b, x, y: b.sub(x, y)},
)
_define(
    (operator.mul, operator.imul),
    {FLOATS: lambda b, x, y: b.fmul(x, y), INTS: lambda b, x, y: b.mul(x, y)},
)
_define((operator.truediv, operator.itruediv), {FLOATS: lambda b, x, y: b.fdiv(x, y)})
_define(
    (operator.and_, operator.iand),
    {INTS: lambda b, x, y: b.and_(x, y), MASK: lambda b, x, y: b.and_(x, y)},
)
_define(
    (operator.or_, operator.ior),
    {INTS: lambda b, x, y: b.or_(x, y), MASK: lambda b, x, y: b.or_(x, y)},
)
_define(
    (operator.xor, operator.ixor),
    {INTS: lambda b, x, y: b.xor(x, y), MASK: lambda b, x, y: b.xor(x, y)},
)
_define((operator.lshift, operator.ilshift), {INTS: lambda b, x, y: b.shl(x, y)})
_define((operator.rshift, operator.irshift), {INTS: lambda b, x, y: b.ashr(x, y)})
_define((operator.lt,), _compare("<"), MASK)
_define((operator.le,), _compare("<="), MASK)
_define((operator.gt,), _compare(">"), MASK)
_define((operator.ge,), _compare(">="), MASK)
_define((operator.eq,), _compare("=="), MASK)
_define((operator.ne,), _compare("!="), MASK)


@type_callable(operator.invert)
def _type_invert(_context: Any) -> Any:
    return lambda value: value if value in (INTS, MASK) else None


@lower_builtin(operator.invert, INTS)
@lower_builtin(operator.invert, MASK)
def _lower_invert(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    return builder.not_(args[0])


@type_callable(operator.neg)
def _type_negative(_context: Any) -> Any:
    return lambda value: value if value in (FLOATS, INTS) else None


@lower_builtin(operator.neg, FLOATS)
def _lower_negative_floats(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    return builder.fneg(args[0])


@lower_builtin(operator.neg, INTS)
def _lower_negative_ints(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    return builder.neg(args[0])


# ---- making, choosing and converting lanes ---------------------------------------------------------


@operation
def splat(_context: Any, scalar: Any) -> Any:
    """Return lanes that all hold one float32 (Floats) or one integer (Ints)."""
    if scalar == types.float32:
        result = FLOATS
    elif is_integer(scalar):
        result = INTS
    else:
        return None
    return result(scalar), lambda _ctx, builder, sig, args: _widen(builder, sig.args[0], args[0])


@operation
def lane_numbers(_context: Any) -> Any:
    """Return Ints 0, 1, ... LANES - 1."""
    return INTS(), lambda _ctx, _builder, _sig, _args: ir.Constant(I32, list(range(LANES)))


@operation
def select(_context: Any, mask: Any, yes: Any, no: Any) -> Any:
    """Return yes where mask holds and no elsewhere; one of the two may be a scalar.

    Of three scalars it is the ternary operator, for functions that take lanes or a scalar.
    """
    if mask == types.boolean:
        return _select_scalar(yes, no)
    result = _pair(yes, no)
    if mask != MASK or result is None:
        return None

    def emit(_ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(args[0], *(_widen(builder, sig.args[k], args[k]) for k in (1, 2)))

    return result(mask, yes, no), emit


def _select_scalar(yes: Any, no: Any) -> Any:
    if is_integer(yes) and is_integer(no):
        item: Any = types.int64
    elif yes == no == types.float32:
        item = yes
    else:
        return None
    return item(types.boolean, item, item), lambda _ctx, builder, _sig, args: builder.select(*args)


def _extreme(symbol: str) -> Callable[..., Any]:
    def typed(_context: Any, left: Any, right: Any) -> Any:
        meet = _pair(left, right)
        if meet not in (FLOATS, INTS):
            return None

        def emit(_ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            x, y = (_widen(builder, t, v) for t, v in zip(sig.args, args, strict=True))
            return builder.select(_compare(symbol)[meet](builder, x, y), x, y)

        return meet(left, right), emit

    return typed


@operation
def minimum(context: Any, left: Any, right: Any) -> Any:
    """Return left where left < right, else right: so right where either is NaN, as C's `a < b ? a : b`."""
    return _extreme("<")(context, left, right)


@operation
def maximum(context: Any, left: Any, right: Any) -> Any:
    """Return left where left > right, else right: so right where either is NaN, as C's `a > b ? a : b`."""
    return _extreme(">")(context, left, right)


def _unary(name: str) -> Callable[..., Any]:
    def typed(_context: Any, value: Any) -> Any:
        if value != FLOATS:
            return None

        def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
            signature = ir.FunctionType(F32, [F32])
            return builder.call(
                cgutils.get_or_insert_function(builder.module, signature, f"{name}.v{LANES}f32"), args
            )

        return FLOATS(FLOATS), emit

    return typed


@operation
def absolute(context: Any, value: Any) -> Any:
    """Return Floats without their sign."""
    return _unary("llvm.fabs")(context, value)


@operation
def square_root(context: Any, value: Any) -> Any:
    """Return the correctly rounded square roots of Floats."""
    return _unary("llvm.sqrt")(context, value)


@operation
def to_float(_context: Any, value: Any) -> Any:
    """Return Ints as Floats, rounded to nearest even."""
    return FLOATS(INTS), lambda _ctx, builder, _sig, args: builder.sitofp(args[0], F32)


@operation
def to_int(_context: Any, value: Any) -> Any:
    """Return Floats as Ints, cut off toward zero; a value beyond int32 gives an unspecified integer."""
    return INTS(FLOATS), lambda _ctx, builder, _sig, args: builder.fptosi(args[0], I32)


@operation
def bits(_context: Any, value: Any) -> Any:
    """Return the 32 bits of Floats as Ints, or of a scalar float32 as int32."""
    if value == FLOATS:
        return INTS(FLOATS), lambda _ctx, builder, _sig, args: builder.bitcast(args[0], I32)
    if value == types.float32:
        return types.int32(value), lambda _ctx, builder, _sig, args: builder.bitcast(args[0], WORD)
    return None


@operation
def from_bits(_context: Any, value: Any) -> Any:
    """Return the Floats that Ints are the bits of, or the float32 of a scalar integer's lower 32."""
    if value == INTS:
        return FLOATS(INTS), lambda _ctx, builder, _sig, args: builder.bitcast(args[0], F32)
    if not is_integer(value):
        return None

    def emit(_ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(_to_word(builder, args[0], sig.args[0].signed), ir.FloatType())

    return types.float32(value), emit


@operation
def shift_right_logical(_context: Any, value: Any, count: Any) -> Any:
    """Return Ints shifted right by a scalar count, zeros moved in (`>>` moves in the sign)."""
    if value != INTS or not is_integer(count):
        return None

    def emit(_ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.lshr(args[0], _widen(builder, sig.args[1], args[1]))

    return INTS(value, count), emit


def _reduce(all_set: bool) -> Callable[..., Any]:
    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        word = ir.IntType(LANES)
        compared = ir.Constant(word, -1 if all_set else 0)
        return builder.icmp_signed("==" if all_set else "!=", builder.bitcast(args[0], word), compared)

    return emit


@operation
def any_lane(_context: Any, mask: Any) -> Any:
    """Return whether a Mask holds in at least one lane."""
    return types.boolean(MASK), _reduce(all_set=False)


@operation
def all_lanes(_context: Any, mask: Any) -> Any:
    """Return whether a Mask holds in every lane."""
    return types.boolean(MASK), _reduce(all_set=True)
