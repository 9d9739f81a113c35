"""Options as JSON data, and back: what a pipeline keeps beside a file, to make it again.

    text = json.dumps(ForwardOptions(dtype="bfloat16").to_json())
    ForwardOptions.from_json(json.loads(text))

All fields are there by name. Paths are texts, types their names, tuples lists, and options within options
objects. A value that JSON has nothing for, such as a function or an array, is refused, unless it is the
field's default, which is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any, TypeVar, get_args, get_origin

from gguf_tools.argument_types import described, fields_of
from gguf_tools.errors import BadArgument, FormatError, WrongType
from gguf_tools.format.ggml_types import GGMLType, by_name
from gguf_tools.text import did_you_mean, quoted

T = TypeVar("T")


def to_json(options: Any, place: str = "") -> dict[str, Any]:
    """Return the fields of a dataclass as JSON data; raises WrongType naming one that JSON can't hold.

    place  stands before the names in messages: "forward."
    """
    own: Any = type(options)
    data, expected = {}, fields_of(own)
    for each in _saved(options):
        value = getattr(options, each.name)
        try:
            if _is_record(value) and type(value) not in expected[each.name].hints:
                raise WrongType(_nothing_for(value, place + each.name))  # of which class is not known later
            data[each.name] = _plain(value, place + each.name)
        except WrongType:
            if each.default is MISSING or value != each.default:
                raise
    return data


def from_json(class_: type[T], data: object) -> T:
    """Make a dataclass of JSON data; fields that are left out have their defaults.

    raises  BadArgument for a key that is no field, and for a value that the field can't have
    """
    name = class_.__name__
    if not isinstance(data, Mapping):
        raise WrongType(f"{name}: found {described(data)}, expected an object with its fields")
    options: Any = class_
    expected = fields_of(options)
    known = [each.name for each in _saved(options)]
    for key in data:
        if key not in known:
            near = did_you_mean(str(key), known) or f"; expected {', '.join(known)}"
            raise BadArgument(f"{name} has no field {quoted(str(key))}{near}")
    missing = [each.name for each in _saved(options) if _is_needed(each) and each.name not in data]
    if missing:
        raise BadArgument(f"{name}: {missing[0]} is missing")
    return class_(**{key: _made(value, expected[key].hints) for key, value in data.items()})


def _saved(options: Any) -> list[Field[Any]]:
    return [each for each in fields(options) if each.init and not each.name.startswith("_")]


def _is_needed(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _plain(value: Any, name: str) -> Any:
    """Return a value as JSON data; raises WrongType, with the name of the field."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, GGMLType):
        return value.name
    if _is_record(value):
        return to_json(value, f"{name}.")
    if isinstance(value, Mapping):
        return {str(key): _plain(each, name) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each, name) for each in value]
    raise WrongType(_nothing_for(value, name))


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _nothing_for(value: Any, name: str) -> str:
    return f"{name}: found {described(value)}, which options in JSON can't hold"


def _made(value: Any, hints: Iterable[Any]) -> Any:
    """Return the value of a field that may have these."""
    for hint in hints:
        try:
            if isinstance(value, str) and hint is GGMLType:
                return by_name(value)
            if value is not None and isinstance(hint, type) and issubclass(hint, Enum):
                return hint(value)
        except (FormatError, ValueError) as error:
            raise BadArgument(str(error)) from error
        if isinstance(value, Mapping) and isinstance(hint, type) and is_dataclass(hint):
            return from_json(hint, value)
        if isinstance(value, Mapping) and get_origin(hint) is Mapping:
            return {key: _made(each, get_args(hint)[1:]) for key, each in value.items()}
    if isinstance(value, list):
        items = [item for hint in hints for item in get_args(hint) if item is not ...]
        return tuple(_made(each, items) for each in value)
    return value
