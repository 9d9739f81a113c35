"""The pickle in a file of torch, run by an interpreter that can do nothing but describe tensors.

A pickle is a program for a stack: it names functions of Python and calls them. Here a name is a word, a call
of one of the few functions that torch writes gives a description, and any other is refused. So nothing is
imported, no function of others is called, and no object has an attribute set. Only the instructions that
torch writes are known (protocol 2). One makes at most one object, whose size is that of what it takes from
the stack, so memory grows with the program and not by what it says.

Of what lies beside tensors (an optimizer's state, sizes, devices ...), numbers, texts, lists and dictionaries
are kept, and the rest is kept as the name of its type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pickletools import genops
from types import MappingProxyType
from typing import Any

from gguf_tools.text import shown


@dataclass(frozen=True, slots=True, eq=False)
class Word:
    """A name of Python's or torch's that a pickle mentions; or the type of a value that isn't made."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Numbers in a record of the file.

    dtype    torch's name of their type: "float32"
    key      name of the record
    n_bytes  that the pickle says it has
    """

    dtype: str
    key: str
    n_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor as a pickle describes it.

    dtype    torch's name: "float32"
    storage  that has its numbers; None for a nested or sparse tensor, and for one without data
    offset   of the first element in the storage, in elements
    shape    (n, ...), rows first
    strides  elements from one to the next along each axis
    is_view  whether the numbers stand for others, negated ones or conjugates
    """

    dtype: str
    storage: Storage | None
    offset: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    is_view: bool = False

    def is_contiguous(self) -> bool:
        """Whether the elements lie row by row, without gaps."""
        n_elements = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != n_elements:
                return False
            n_elements *= n
        return True


def describe(program: bytes) -> Any:
    """Return the value of a program, in dictionaries, lists, tuples, numbers, texts and the types above.

    raises  ValueError for anything that torch does not write for tensors and plain values
    """
    try:
        return _run(program)
    except (AttributeError, DeprecationWarning, IndexError, KeyError, RecursionError, TypeError) as error:
        # An empty stack, an unknown number of the memo, a call with other arguments; and, where warnings are
        # errors, an escape in a text.
        raise ValueError(f"no pickle that torch writes ({type(error).__name__})") from error


def type_name(value: object) -> str:
    """Return how messages call the type of a value that was described."""
    return value.text if isinstance(value, Word) else type(value).__name__


def _run(program: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop_from(start: int) -> list[Any]:
        items = stack[start:]
        del stack[start:]
        return items

    argument: Any
    for opcode, argument, position in genops(program):
        match opcode.name:
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "NONE":
                stack.append(argument)
            case "NEWFALSE" | "NEWTRUE":
                stack.append(opcode.name == "NEWTRUE")
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(pop_from(marks.pop())))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(pop_from(-int(opcode.name[-1]))))
            case "APPEND" | "APPENDS":
                items = pop_from(marks.pop() if opcode.name == "APPENDS" else -1)
                _only(list, stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS":
                items = pop_from(marks.pop() if opcode.name == "SETITEMS" else -2)
                pairs = zip(map(_checked_key, items[::2]), items[1::2], strict=True)
                _only(dict, stack[-1]).update(pairs)
            case "GLOBAL":
                stack.append(_word(argument.replace(" ", ".", 1)))
            case "REDUCE" | "NEWOBJ":
                stack.append(_call(*pop_from(-2)))
            case "BINPERSID":
                stack.append(_storage(*_only(tuple, stack.pop())))
            case "BUILD":  # what an OrderedDict has beside its pairs: versions of a model's modules
                stack.pop()
                _only(dict, stack[-1])
            case "PROTO":
                pass
            case "STOP":
                return stack.pop()
            case _:
                raise ValueError(f"instruction {opcode.name} at byte {position}, which torch does not write")
    raise AssertionError  # genops raises ValueError for a program without STOP


def _only(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(value)
    return value


def _checked_key(key: Any) -> Any:
    """Return a key that is hashed at once: nested ones may take for ever, or all of the stack."""
    for part in key if isinstance(key, tuple) and len(key) < 16 else (key,):
        is_long = isinstance(part, int) and part.bit_length() > 63
        if is_long or not isinstance(part, str | int | float | None):
            raise ValueError(f"a key of type {type_name(key)}, expected text or a number of up to 63 bits")
    return key


# ---- names


_STORAGES: Mapping[str, tuple[str, int]] = MappingProxyType({
    "torch.BoolStorage": ("bool", 1), "torch.ByteStorage": ("uint8", 1), "torch.CharStorage": ("int8", 1),
    "torch.ShortStorage": ("int16", 2), "torch.IntStorage": ("int32", 4), "torch.LongStorage": ("int64", 8),
    "torch.HalfStorage": ("float16", 2), "torch.BFloat16Storage": ("bfloat16", 2),
    "torch.FloatStorage": ("float32", 4), "torch.DoubleStorage": ("float64", 8),
    "torch.ComplexFloatStorage": ("complex64", 8), "torch.ComplexDoubleStorage": ("complex128", 16),
    "torch.QInt8Storage": ("qint8", 1), "torch.QUInt8Storage": ("quint8", 1),
    "torch.QInt32Storage": ("qint32", 4), "torch.QUInt4x2Storage": ("quint4x2", 1),
    "torch.QUInt2x4Storage": ("quint2x4", 1), "torch.storage.UntypedStorage": ("uint8", 1),
})  # fmt: skip
"""Type and size in bytes of a number, by the class of its storage."""

_CONSTANTS = re.compile(
    r"torch\.(bool|(bfloat|float|complex|q?u?int|bits)\d\w*|per_(tensor|channel)_\w+|Tensor)"
    r"|torch\.nn\.parameter\.Parameter"
)
"""Types of numbers, ways to quantize, and the types of tensors, which are named and never called."""


def _word(name: str) -> Word:
    name = name.replace("__builtin__.", "builtins.")
    if not (name in _CALLS or name in _STORAGES or _CONSTANTS.fullmatch(name)):
        raise ValueError(f"names {shown(name)}, expected only tensors and plain values")
    return Word(name)


def _storage(kind: str, of: Word, key: str, device: str, n_elements: int) -> Storage:
    del device  # where it was; it is read here
    dtype, size = _STORAGES[of.text]
    if kind != "storage" or not isinstance(key, str) or not _are_sizes((n_elements,)):
        raise TypeError(kind)
    return Storage(dtype, key, n_elements * size)


# ---- calls


def _call(function: Word, arguments: tuple[Any, ...]) -> Any:
    if not isinstance(function, Word) or function.text not in _CALLS:
        raise ValueError(f"calls {shown(type_name(function))}, which is no function for tensors")
    return _CALLS[function.text](*_only(tuple, arguments))


def _tensor(
    storage: Storage, offset: int, shape: Any, strides: Any, dtype: Word | None = None, metadata: Any = None
) -> Tensor:
    """Describe a tensor, with numbers of its storage's type unless told; `metadata` makes it a view."""
    if not isinstance(storage, Storage) or not _are_sizes((offset, *shape, *strides)):
        raise TypeError(storage)
    if len(shape) != len(strides) or len(shape) > _MOST_AXES:
        raise ValueError(f"a tensor of {len(shape)} axes, expected at most {_MOST_AXES}, each with a stride")
    name = storage.dtype if dtype is None else dtype.text.removeprefix("torch.")
    return Tensor(name, storage, offset, tuple(shape), tuple(strides), is_view=bool(metadata))


_MOST_AXES = 64
"""Those of torch's tensors."""


def _are_sizes(values: tuple[Any, ...]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _empty_dictionary() -> dict[Any, Any]:
    return {}


def _unwrapped(tensor: Any, *_: Any) -> Any:
    return tensor


_CALLS: Mapping[str, Callable[..., Any]] = MappingProxyType({
    # Arguments 5 and 6 ask for a gradient and hooks, which weights that are read have no use for.
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": lambda storage, offset, shape, strides, _gradient, _hooks, view=None:
        _tensor(storage, offset, shape, strides, None, view),
    "torch._utils._rebuild_tensor_v3": lambda *given: _tensor(*given[:4], *given[6:]),
    "torch._utils._rebuild_qtensor": lambda *given: _tensor(*given[:4]),
    "torch._utils._rebuild_sparse_tensor": lambda *_: Tensor("", None),
    "torch._utils._rebuild_nested_tensor": lambda *_: Tensor("", None),
    "torch._utils._rebuild_meta_tensor_no_storage": lambda *_: Tensor("", None),
    "torch._utils._rebuild_wrapper_subclass": lambda *_: Tensor("", None),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _unwrapped,  # which has the same type
    "torch._utils._rebuild_parameter": _unwrapped,
    "torch._utils._rebuild_parameter_with_state": _unwrapped,
    # with attributes beside the numbers
    "torch._tensor._rebuild_from_type_v2": lambda function, _type, given, _state: _call(function, given),
    "torch.Size": _unwrapped,
    "collections.OrderedDict": _empty_dictionary,
    **{
        name: lambda *_, name=name: Word(name.rpartition(".")[2])
        for name in (
            "builtins.bytearray", "builtins.complex", "builtins.set", "collections.Counter", "torch.device",
            "torch.serialization._get_layout",
        )
    },
    "_codecs.encode": lambda *_: Word("bytes"),
})  # fmt: skip
"""Functions that torch writes, and what calling one describes."""
