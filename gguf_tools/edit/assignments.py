"""Metadata values as a user writes them: KEY=TYPE:VALUE.

    general.name=str:DeepSeek V3              deepseek2.context_length=u32:163840
    tokenizer.ggml.add_bos_token=bool:true    general.tags=[str]:chat,moe
    tokenizer.chat_template=str@chat.jinja    the value is the text of a file, as it is
    general.tags=[str]:["a, b", "c"]          an array in JSON, for items with commas
    general.name=DeepSeek V3                  with the type that the key has, or that llama.cpp expects
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf_tools.errors import BadRequest
from gguf_tools.files.named_files import read_input
from gguf_tools.format.values import FIXED_CODES, Kind, Value, as_float32, text_of

_KINDS: Mapping[str, Kind] = {
    "u8": Kind.UINT8,
    "i8": Kind.INT8,
    "u16": Kind.UINT16,
    "i16": Kind.INT16,
    "u32": Kind.UINT32,
    "i32": Kind.INT32,
    "u64": Kind.UINT64,
    "i64": Kind.INT64,
    "f32": Kind.FLOAT32,
    "f64": Kind.FLOAT64,
    "bool": Kind.BOOL,
    "str": Kind.STRING,
    **{kind.name.lower(): kind for kind in Kind if kind is not Kind.ARRAY},
}
_TYPES_TEXT = "u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, bool, str, or one of them in [ ]"
# Spellings of other programs, which without this would become part of a string.
_VAGUE = ("int", "float")
_BOOLS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}

_TYPED = re.compile(
    r"(?P<array>\[)?(?P<kind>[a-z]+[0-9]*)(?(array)\])(?P<from>[:@])(?P<rest>.*)", re.DOTALL
)


@dataclass(frozen=True)
class Assignment:
    """One KEY=VALUE.

    type_name  as in Value.type_name; None if none was given
    text       the value, not yet read
    """

    key: str
    type_name: str | None
    text: str


def parse_assignment(argument: str) -> Assignment:
    """Parse KEY=TYPE:VALUE, KEY=TYPE@FILE or KEY=VALUE.

    raises  BadRequest if it is none of these, or if the file can't be read
    """
    key, equals, text = argument.partition("=")
    if not key or not equals:
        raise BadRequest(f"{argument!r}: expected KEY=TYPE:VALUE")
    match = _TYPED.fullmatch(text)
    if match is None or not (match["kind"] in _KINDS or match["kind"] in _VAGUE or match["array"]):
        return Assignment(key, None, text)
    if match["kind"] not in _KINDS:
        raise BadRequest(f"key {key!r}: {match['kind']!r} is not a type, expected {_TYPES_TEXT}")
    type_name = _KINDS[match["kind"]].name.lower()
    if match["array"]:
        type_name = f"array of {type_name}"
    rest = match["rest"] if match["from"] == ":" else text_of(read_input(match["rest"]))
    return Assignment(key, type_name, rest)


def parse_value(key: str, type_name: str, text: str) -> Value:
    """Return `text` as a value of a type.

    type_name  as in Value.type_name; no array of arrays
    raises     BadRequest, naming the key, if the text is not such a value
    """
    name = type_name.removeprefix("array of ")
    kind = Kind[name.upper()]
    if name == type_name:
        return Value(kind, _scalar(key, kind, text))
    if kind is Kind.ARRAY:
        raise BadRequest(f"key {key!r}: an array of arrays can't be written here")
    return Value.array(kind, [_scalar(key, kind, item) for item in _items(key, text)])


def _items(key: str, text: str) -> list[str]:
    """The items of an array: JSON in brackets, or separated by commas."""
    text = text.strip()
    if not text.startswith("["):
        return [item.strip() for item in text.split(",")] if text else []
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"key {key!r}: begins like a JSON array, but is none: {error}") from None
    for item in items:
        if item is None or isinstance(item, list | dict):
            raise BadRequest(f"key {key!r}: an array holds {json.dumps(item)}, expected a plain value")
    return [item if isinstance(item, str) else json.dumps(item) for item in items]


def _scalar(key: str, kind: Kind, text: str) -> Any:
    if kind is Kind.STRING:
        return text
    text = text.strip()
    if kind is Kind.BOOL:
        if text.lower() not in _BOOLS:
            raise BadRequest(f"key {key!r}: {text!r} is not a bool, expected true or false")
        return _BOOLS[text.lower()]
    try:
        if kind is Kind.FLOAT32:
            return as_float32(float(text))
        if kind is Kind.FLOAT64:
            return float(text)
        number = int(text, 0)
        struct.pack("<" + FIXED_CODES[kind], number)
    except (ValueError, OverflowError, struct.error):
        raise BadRequest(f"key {key!r}: {text!r} is not a number that {kind.name.lower()} can hold") from None
    return number
