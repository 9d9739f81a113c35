"""SIMD vectors as numba types: one value per lane, so that a kernel reads like the scalar arithmetic it is.

    Floats   float32 per lane    + - * / and comparisons, with Floats or a scalar float32
    Ints     int32 per lane      + - * & | ^ << >> and comparisons, with Ints or a scalar integer
    Mask     boolean per lane    & | ^ ~

A lane never branches: `select` chooses between two results that were both computed. Every operation is the
IEEE one of its scalar twin, in the order written: no flag allows LLVM to reassociate or to fuse a product
with a sum. So a lane holds what scalar C compiled without such flags would hold.

A vector has LANES lanes, or a multiple: searches take several sub-blocks at once (`lane_memory.beside`),
because one alone leaves the processor waiting for sums and quotients. LANES is 16, an AVX-512 register.
Other targets get the same code: LLVM splits a vector into as many registers as it takes.

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

# What type checkers see of these and of the operations below is in lanes.pyi.
Floats = Any
Ints = Any
Mask = Any

WORD = ir.IntType(32)
_ITEMS = {"float32": ir.FloatType(), "int32": WORD, "mask": ir.IntType(1)}


def operation(definition: Callable[..., Any]) -> Any:
    """Return numba's intrinsic of `definition`, which names argument and result types and emits LLVM code."""
    return intrinsic(definition)


def constant_operation(definition: Callable[..., Any]) -> Any:
    """Return an operation that sees the values of constant arguments."""
    return intrinsic(prefer_literal=True)(definition)


class LaneType(types.Type):
    """The numba type of a vector.

    kind    "float32", "int32" or "mask"
    count   number of lanes
    vector  its LLVM type
    """

    def __init__(self, kind: str, count: int) -> None:
        self.kind = kind
        self.count = count
        self.vector = ir.VectorType(_ITEMS[kind], count)
        super().__init__(name=f"{kind}x{count}")

    def with_kind(self, kind: str) -> LaneType:
        """Return the type of as many lanes of another kind."""
        return LaneType(kind, self.count)

    def constant(self, items: Any) -> ir.Constant:
        """Return an LLVM constant: one item per lane, or ir.Undefined."""
        return ir.Constant(self.vector, items)


FLOATS = LaneType("float32", LANES)
INTS = LaneType("int32", LANES)


@register_model(LaneType)
class _LaneModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lane_type: LaneType) -> None:
        super().__init__(manager, lane_type, lane_type.vector)


def is_lanes(type_: Any, *kinds: str) -> bool:
    """Return whether a numba type is a vector of one of these kinds."""
    return isinstance(type_, LaneType) and type_.kind in kinds


def is_integer(type_: Any) -> bool:
    return isinstance(type_, types.Integer)


# ---- operators -------------------------------------------------------------------------------------


def broadcast(builder: Any, value: Any, count: int) -> Any:
    """Return LLVM code for a vector of `count` lanes that all hold a scalar."""
    vector = ir.VectorType(value.type, count)
    nothing = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(WORD, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(WORD, count), [0] * count))


def _to_word(builder: Any, value: Any, signed: bool) -> Any:
    """Return a scalar integer of any width as 32 bits, the upper ones dropped."""
    if value.type.width > 32:
        return builder.trunc(value, WORD)
    if value.type.width < 32:
        return builder.sext(value, WORD) if signed else builder.zext(value, WORD)
    return value


def _widen(builder: Any, type_: Any, value: Any, count: int) -> Any:
    """Return an operand as a vector: lanes as they are, a scalar copied to `count` lanes."""
    if isinstance(type_, LaneType):
        return value
    if is_integer(type_):
        value = _to_word(builder, value, type_.signed)
    return broadcast(builder, value, count)


def _meet(left: Any, right: Any) -> LaneType | None:
    """Return the lane type in which two operands are computed, or None if they don't go together."""
    for lanes, other in ((left, right), (right, left)):
        if isinstance(lanes, LaneType):
            scalar = {"float32": other == types.float32, "int32": is_integer(other)}
            if other == lanes or scalar.get(lanes.kind):
                return lanes
    return None


Emit = Callable[[Any, Any, Any], Any]


def _emit_binary(emit: Emit) -> Callable[..., Any]:
    """Return numba's lowering of a binary operation on lanes, one operand of which may be a scalar."""

    def lower(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        meet = _meet(*signature.args)
        assert meet is not None  # the typing of the operation has admitted these operands
        return emit(
            builder, *(_widen(builder, t, v, meet.count) for t, v in zip(signature.args, args, strict=True))
        )

    return lower


def _define(symbols: tuple[Any, ...], emit: dict[str, str]) -> None:
    """Teach numba a binary operator on lanes: for each kind, the IRBuilder method that emits it."""

    def typer(_context: Any) -> Any:
        def type_of(left: Any, right: Any) -> Any:
            meet = _meet(left, right)
            return meet if meet is not None and meet.kind in emit else None

        return type_of

    def emit_by_kind(builder: Any, left: Any, right: Any) -> Any:
        kinds = {item: kind for kind, item in _ITEMS.items()}
        return getattr(builder, emit[kinds[left.type.element]])(left, right)

    _register(symbols, typer, emit_by_kind)


def _define_comparison(symbol: Any, sign: str) -> None:
    """Teach numba a comparison of Floats and of Ints."""

    def typer(_context: Any) -> Any:
        def type_of(left: Any, right: Any) -> Any:
            meet = _meet(left, right)
            return meet.with_kind("mask") if meet is not None and meet.kind != "mask" else None

        return type_of

    _register((symbol,), typer, _comparison(sign))


def _comparison(sign: str) -> Emit:
    """Return the definition of a comparison. As in C, != holds for NaN, every other one fails."""

    def emit(builder: Any, left: Any, right: Any) -> Any:
        if left.type.element == WORD:
            return builder.icmp_signed(sign, left, right)
        return (builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered)(sign, left, right)

    return emit


def _register(symbols: tuple[Any, ...], typer: Callable[..., Any], emit: Emit) -> None:
    for symbol in symbols:
        type_callable(symbol)(typer)
        lower_builtin(symbol, LaneType, LaneType)(_emit_binary(emit))
        for scalar in (types.float32, types.Integer):
            lower_builtin(symbol, LaneType, scalar)(_emit_binary(emit))
            lower_builtin(symbol, scalar, LaneType)(_emit_binary(emit))


_define((operator.add, operator.iadd), {"float32": "fadd", "int32": "add"})
_define((operator.sub, operator.isub), {"float32": "fsub", "int32": "sub"})
_define((operator.mul, operator.imul), {"float32": "fmul", "int32": "mul"})
_define((operator.truediv, operator.itruediv), {"float32": "fdiv"})
_define((operator.and_, operator.iand), {"int32": "and_", "mask": "and_"})
_define((operator.or_, operator.ior), {"int32": "or_", "mask": "or_"})
_define((operator.xor, operator.ixor), {"int32": "xor", "mask": "xor"})
_define((operator.lshift, operator.ilshift), {"int32": "shl"})
_define((operator.rshift, operator.irshift), {"int32": "ashr"})
_define_comparison(operator.lt, "<")
_define_comparison(operator.le, "<=")
_define_comparison(operator.gt, ">")
_define_comparison(operator.ge, ">=")
_define_comparison(operator.eq, "==")
_define_comparison(operator.ne, "!=")


@type_callable(operator.invert)
def _type_invert(_context: Any) -> Any:
    return lambda value: value if is_lanes(value, "int32", "mask") else None


@lower_builtin(operator.invert, LaneType)
def _lower_invert(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    return builder.not_(args[0])


@type_callable(operator.neg)
def _type_negative(_context: Any) -> Any:
    return lambda value: value if is_lanes(value, "float32", "int32") else None


@lower_builtin(operator.neg, LaneType)
def _lower_negative(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    return builder.neg(args[0]) if args[0].type.element == WORD else builder.fneg(args[0])


# ---- making, choosing and converting lanes ---------------------------------------------------------


@operation
def splat(_context: Any, scalar: Any) -> Any:
    """Return LANES lanes that all hold one float32 (Floats) or one integer (Ints)."""
    if scalar == types.float32:
        result = FLOATS
    elif is_integer(scalar):
        result = INTS
    else:
        return None
    return result(scalar), lambda _ctx, builder, sig, args: _widen(builder, sig.args[0], args[0], LANES)


@operation
def lane_numbers(_context: Any) -> Any:
    """Return Ints 0, 1, ... LANES - 1."""
    return INTS(), lambda _ctx, _builder, _sig, _args: INTS.constant(list(range(LANES)))


@operation
def select(_context: Any, mask: Any, yes: Any, no: Any) -> Any:
    """Return yes where mask holds and no elsewhere; one of the two may be a scalar.

    Of three scalars it is the ternary operator, for functions that take lanes or a scalar.
    """
    if mask == types.boolean:
        return _select_scalar(yes, no)
    result = _meet(yes, no)
    if result is None or mask != result.with_kind("mask"):
        return None

    def emit(_ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        choices = (_widen(builder, sig.args[k], args[k], result.count) for k in (1, 2))
        return builder.select(args[0], *choices)

    return result(mask, yes, no), emit


def _select_scalar(yes: Any, no: Any) -> Any:
    if is_integer(yes) and is_integer(no):
        item: Any = types.int64
    elif yes == no == types.float32:
        item = yes
    else:
        return None
    return item(types.boolean, item, item), lambda _ctx, builder, _sig, args: builder.select(*args)


def _extreme(sign: str, left: Any, right: Any) -> Any:
    meet = _meet(left, right)
    if meet is None or meet.kind == "mask":
        return None
    emit = _emit_binary(lambda builder, x, y: builder.select(_comparison(sign)(builder, x, y), x, y))
    return meet(left, right), emit


@operation
def minimum(_context: Any, left: Any, right: Any) -> Any:
    """Return left where left < right, else right: so right where either is NaN, as C's `a < b ? a : b`."""
    return _extreme("<", left, right)


@operation
def maximum(_context: Any, left: Any, right: Any) -> Any:
    """Return left where left > right, else right: so right where either is NaN, as C's `a > b ? a : b`."""
    return _extreme(">", left, right)


def _unary(name: str, value: Any) -> Any:
    if not is_lanes(value, "float32"):
        return None

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        signature = ir.FunctionType(value.vector, [value.vector])
        function = cgutils.get_or_insert_function(builder.module, signature, f"{name}.v{value.count}f32")
        return builder.call(function, args)

    return value(value), emit


@operation
def absolute(_context: Any, value: Any) -> Any:
    """Return Floats without their sign."""
    return _unary("llvm.fabs", value)


@operation
def square_root(_context: Any, value: Any) -> Any:
    """Return the correctly rounded square roots of Floats."""
    return _unary("llvm.sqrt", value)


def _conversion(value: Any, source: str, target: str, method: str) -> Any:
    """Return the definition of an operation from one kind of lanes to another by an IRBuilder method."""
    if not is_lanes(value, source):
        return None
    result = value.with_kind(target)
    return result(value), lambda _ctx, builder, _sig, args: getattr(builder, method)(args[0], result.vector)


@operation
def to_float(_context: Any, value: Any) -> Any:
    """Return Ints as Floats, rounded to nearest even."""
    return _conversion(value, "int32", "float32", "sitofp")


@operation
def to_int(_context: Any, value: Any) -> Any:
    """Return Floats as Ints, cut off toward zero; a value beyond int32 gives an unspecified integer."""
    return _conversion(value, "float32", "int32", "fptosi")


@operation
def bits(_context: Any, value: Any) -> Any:
    """Return the 32 bits of Floats as Ints, or of a scalar float32 as int32."""
    if value == types.float32:
        return types.int32(value), lambda _ctx, builder, _sig, args: builder.bitcast(args[0], WORD)
    return _conversion(value, "float32", "int32", "bitcast")


@operation
def from_bits(_context: Any, value: Any) -> Any:
    """Return the Floats that Ints are the bits of, or the float32 of a scalar integer's lower 32."""
    if not is_integer(value):
        return _conversion(value, "int32", "float32", "bitcast")

    def emit(_ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(_to_word(builder, args[0], sig.args[0].signed), ir.FloatType())

    return types.float32(value), emit


@operation
def shift_right_logical(_context: Any, value: Any, count: Any) -> Any:
    """Return Ints shifted right by a scalar count, zeros moved in (`>>` moves in the sign)."""
    if not is_lanes(value, "int32") or not is_integer(count):
        return None
    return value(value, count), _emit_binary(lambda builder, x, y: builder.lshr(x, y))


def _reduction(mask: Any, sign: str, constant: int) -> Any:
    """Return the definition of an operation that compares a Mask, read as one integer, with a constant."""
    if not is_lanes(mask, "mask"):
        return None
    word = ir.IntType(mask.count)

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.icmp_signed(sign, builder.bitcast(args[0], word), ir.Constant(word, constant))

    return types.boolean(mask), emit


@operation
def any_lane(_context: Any, mask: Any) -> Any:
    """Return whether a Mask holds in at least one lane."""
    return _reduction(mask, "!=", 0)


@operation
def all_lanes(_context: Any, mask: Any) -> Any:
    """Return whether a Mask holds in every lane."""
    return _reduction(mask, "==", -1)
