"""Arguments of functions and fields of options are what their annotations say: one check for all of them.

    @checked
    def evaluate(base: AnyPath, text: AnyPath | None, ...): ...

    @dataclass(frozen=True)
    class Cut(CheckedFields):
        chunk_size: Count = 512

A wrong one is a WrongType, or for a number out of its range a BadArgument, that names it, before any work.
Looked at are classes, numbers, words of a Literal and unions of these; of a container only itself.

Numbers that users choose are of kinds, for options of commands and for arguments of functions:

    THREADS.parse("8")              # as a command line has it; raises BadArgument
    n_threads: Threads | None       # as a function or options declare it
"""

from __future__ import annotations

import ast
import errno
import functools
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, ParamSpec, Self, TypeVar, Union, get_args, get_origin

from gguf_tools.errors import BadArgument, WrongType
from gguf_tools.lazy import late
from gguf_tools.text import MAX_CHARS, quoted

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class CheckedFields:
    """Base of options: a field that is not what its annotation says is refused when they are made.

    Where a Path is expected, a text may be given, which becomes one.
    """

    def __post_init__(self) -> None:
        own: Any = type(self)
        for name, expected in fields_of(own).items():
            value = getattr(self, name)
            if Path in expected.hints and isinstance(value, str | os.PathLike):
                object.__setattr__(self, name, Path(value))
            else:
                expected.check(name, value)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON data; raises WrongType naming a value that JSON can't hold."""
        return dict(late("gguf_tools.json_options").to_json(self))  # which reads annotations as this module

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Make options of what `to_json` has returned; fields that are left out have their defaults.

        raises  BadArgument for a key that is no field, and for a value that the field can't have
        """
        made: Self = late("gguf_tools.json_options").from_json(cls, data)
        return made


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse arguments that are not what the function's annotations say, before it is called.

    A name that no file can have is a BadArgument as well.
    """
    signature = inspect.signature(function)
    expected: dict[str, _Expected] = {}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not expected:  # when it is called first, all modules are complete
            expected.update(_parameters(function, signature))
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name in expected:
                expected[name].check(name, value)
        try:
            return function(*args, **kwargs)
        except OSError as error:
            if error.errno not in _NO_NAMES:
                raise
            raise BadArgument(f"{error.filename}: {error.strerror}") from error

    return call


_NO_NAMES = (errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of names that no file can have; Path.exists raises them, as for no other name."""


def _parameters(
    function: Callable[..., Any], signature: inspect.Signature
) -> Iterator[tuple[str, _Expected]]:
    names = vars(sys.modules[function.__module__])
    for each in signature.parameters.values():
        if each.kind is not inspect.Parameter.VAR_KEYWORD:
            yield each.name, _Expected.of(each.annotation, names)


@functools.cache
def fields_of(options: Any) -> Mapping[str, _Expected]:
    """Return the values that fields of options may have; a field is declared in one of the bases' modules."""
    homes = {
        name: vars(sys.modules[base.__module__])
        for base in reversed(options.__mro__)
        for name in inspect.get_annotations(base)
    }
    return {
        each.name: _Expected.of(str(each.type), homes[each.name]) for each in fields(options) if each.init
    }


@dataclass(frozen=True)
class _Expected:
    """Values that an annotation allows.

    hints  classes, numbers, words, None: whichever of them the value is
    names  classes that are imported for type checkers alone, by name
    """

    hints: tuple[Any, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, annotation: str, names: Mapping[str, Any]) -> _Expected:
        """Read an annotation of a module that has these names."""
        hints, unknown = [], []
        for part in _alternatives(ast.parse(annotation, mode="eval").body):
            try:
                hints += _flat(eval(part, dict(names)))  # an annotation of this project
            except NameError:
                unknown.append(part.partition("[")[0])
        return cls(tuple(hints), tuple(unknown))

    def check(self, name: str, value: object) -> None:
        """Raise WrongType for a value of another type, BadArgument for another number or word."""
        if any(_fits(value, hint) for hint in self.hints):
            return
        if any(class_.__name__ in self.names for class_ in type(value).__mro__):
            return
        expected = " or ".join(dict.fromkeys([*map(_words, self.hints), *self.names]))
        limited = [_type_of(hint) for hint in self.hints if get_origin(hint) in (Annotated, Literal)]
        is_of_type = any(isinstance(value, each) for each in limited) and not isinstance(value, bool)
        error = BadArgument if is_of_type else WrongType
        raise error(f"{name}: found {described(value)}, expected {expected}")


def _alternatives(node: ast.expr) -> list[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_alternatives(node.left), *_alternatives(node.right)]
    return [ast.unparse(node)]


def _flat(hint: Any) -> list[Any]:
    """Return the alternatives of a hint that another name stands for.

    A Literal of many words is for type checkers. Here it is any text: the function says which words are near.
    """
    if get_origin(hint) is Literal and len(get_args(hint)) > _MOST_WORDS:
        return [str]
    if get_origin(hint) in (Union, types.UnionType):
        return [each for inner in get_args(hint) for each in _flat(inner)]
    return [None if hint is type(None) else hint]


_MOST_WORDS = 20


def _type_of(hint: Any) -> Any:
    """Return the class of the values that a hint allows, or several; object for what isn't looked at."""
    origin = get_origin(hint)
    if origin is Annotated:
        return (int, float) if get_args(hint)[0] is float else get_args(hint)[0]
    if origin is Literal:
        return str
    class_ = type(None) if hint is None else origin or hint
    if class_ in _MANY:
        return Iterable
    is_class = isinstance(class_, type) and class_ is not Any and not getattr(class_, "_is_protocol", False)
    return class_ if is_class else object


_MANY = (list, tuple, set, frozenset, Iterable, Sequence)


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        of_numbers = get_args(hint)[0] is not str
        return (of_numbers or isinstance(value, str)) and all(
            each.holds(value) for each in get_args(hint)[1:]
        )
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if isinstance(hint, ForwardRef):
        return any(class_.__name__ == hint.__forward_arg__ for class_ in type(value).__mro__)
    class_ = _type_of(hint)
    if class_ is object:
        return all(hasattr(value, name) for name in _members(hint))
    if class_ is Iterable and isinstance(value, str | bytes):
        return False
    return isinstance(value, class_) and (class_ is bool or not isinstance(value, bool))


def _members(protocol: Any) -> list[str]:
    """Return the names that a value of a protocol has; none for a class that is no protocol."""
    is_protocol = getattr(protocol, "_is_protocol", False)
    return [name for name in dir(protocol) if not name.startswith("_")] if is_protocol else []


def _words(hint: Any) -> str:
    """Return the values that a hint allows, in words, for a message."""
    if get_origin(hint) is Annotated:
        return " and ".join(map(str, get_args(hint)[1:]))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if isinstance(hint, ForwardRef):
        return hint.__forward_arg__
    class_ = _type_of(hint)
    if class_ is Iterable:
        return "a list"
    return "None" if hint is None else getattr(get_origin(hint) or hint, "__name__", str(hint))


def described(value: object) -> str:
    """Return a value for a message: one that is short itself, otherwise what it is."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, str | bytes | int | float | None):
        return quoted(value) if isinstance(value, str) else repr(value)[:MAX_CHARS]
    return f"a value of type {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")


_LONGEST = 400
"""Characters of a number as it is typed; Python refuses to read more than 4300 digits."""

_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class NumberType:
    """Finite numbers from `least` to `most`.

    whole     only whole ones
    above     `least` itself is too small
    besides   one more number, which stands for something: -1 for all
    meaning   what that is
    """

    least: int
    most: int
    whole: bool = True
    above: bool = False
    besides: int | None = None
    meaning: str = ""

    def __str__(self) -> str:
        kind = "whole number" if self.whole else "number"
        span = f"above {self.least}, up to {self.most}" if self.above else f"from {self.least} to {self.most}"
        return f"a {kind} {span}" + (
            "" if self.besides is None else f", or {self.besides} for {self.meaning}"
        )

    def holds(self, value: Any) -> bool:
        """Whether a value is such a number; a bool is none."""
        kind: Any = Integral if self.whole else Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        if value == self.besides:
            return True
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def parse(self, text: str) -> float:
        """Read a number in decimal digits, without blanks; one that is whole as an int.

        raises  BadArgument for anything else
        """
        pattern = _WHOLE if self.whole else _DECIMAL
        number: float | None = None
        if len(text) <= _LONGEST and pattern.fullmatch(text):
            number = int(text) if self.whole else float(text)
        if number is None or not self.holds(number):
            raise BadArgument(f"{quoted(text)} is not {self}")
        return number


def metric_bytes(text: str, *, needs_unit: bool = False) -> int:
    """Read `500M` or `2G` as bytes, in powers of 1000 as llama.cpp's tools do; raises BadArgument."""
    match = re.fullmatch(r"([0-9]{1,18})([KMG]?)", text)
    number = int(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]] if match else None
    if match is None or not BYTES.holds(number) or (needs_unit and not (number and match[2])):
        raise BadArgument(f"{quoted(text)} is no size, expected a number with M or G, for instance 2G")
    return number or 0


_MOST = (1 << 31) - 1
_WEEK = 7 * 86400
_YEAR_MINUTES = 365 * 24 * 60

COUNT = NumberType(1, _MOST)
NATURAL = NumberType(0, _MOST)
CHUNKS = NumberType(1, _MOST, besides=-1, meaning="all")
THREADS = NumberType(1, 1024)  # more than machines have cores for one process, and so many can be started
SEED = NumberType(0, (1 << 63) - 1)  # what torch's generators take
SECONDS = NumberType(0, _WEEK, whole=False, above=True)
MINUTES = NumberType(0, _YEAR_MINUTES, whole=False, above=True)
RATE = NumberType(0, 1, whole=False, above=True)
GIGABYTES = NumberType(0, 1 << 20, whole=False)
BYTES = NumberType(0, 1 << 60)
SIZE = NumberType(1, 1 << 60, whole=False)
SCALE = NumberType(0, 1000, whole=False)
"""Bytes of a file that is to be made."""

BITS = NumberType(0, 64, whole=False, above=True)
"""Bits per weight."""

Count = Annotated[int, COUNT]
Natural = Annotated[int, NATURAL]
Threads = Annotated[int, THREADS]
Seed = Annotated[int, SEED]
Minutes = Annotated[float, MINUTES]
Rate = Annotated[float, RATE]
Bytes = Annotated[int, BYTES]
Scale = Annotated[float, SCALE]
PositiveBytes = Annotated[int, NumberType(1, 1 << 60)]
