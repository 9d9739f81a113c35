"""Edits of a header, as functions from metadata and tensor names to new ones and a list of changes.

They refuse what would leave a file that llama.cpp can't read, or a split set that doesn't fit together.
Nothing here touches a file that is edited. A user writes values as KEY=TYPE:VALUE:

    general.name=str:DeepSeek V3              deepseek2.context_length=u32:163840
    tokenizer.ggml.add_bos_token=bool:true    general.tags=[str]:chat,moe
    tokenizer.chat_template=str@chat.jinja    the value is the text of a file, as it is
    general.tags=[str]:["a, b", "c"]          an array in JSON, for items with commas
    general.name=DeepSeek V3                  with the type that the key has, or that llama.cpp expects
    tokenizer.chat_template=@chat.jinja       so is the text of a file; str: before an @ that is text
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gguf_tools.errors import BadRequest
from gguf_tools.expressions import parse_expression
from gguf_tools.files.named_files import read_input
from gguf_tools.format import keys
from gguf_tools.format.hparams import architecture_of
from gguf_tools.format.shards import SPLIT_KEYS
from gguf_tools.format.shown import value_text
from gguf_tools.format.values import FIXED_BYTES, FIXED_CODES, Kind, Metadata, Value, as_float32, text_of
from gguf_tools.text import printable, quoted

_KINDS: Mapping[str, Kind] = {
    **{f"{kind.name[0].lower()}{8 * FIXED_BYTES[kind]}": kind for kind in FIXED_BYTES if kind != Kind.BOOL},
    "str": Kind.STRING,
    **{kind.name.lower(): kind for kind in Kind if kind is not Kind.ARRAY},
}
_TYPES_TEXT = "u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, bool, str, or one of them in [ ]"
# Spellings of other programs, which without this would become part of a string.
_VAGUE = ("int", "float")
_BOOLS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}

_TYPED = re.compile(r"(?P<array>\[)?(?P<kind>[a-z]+[0-9]*)(?(array)\])(?P<from>[:@])(?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True)
class Assignment:
    """One KEY=VALUE.

    type_name  as in Value.type_name; None if none was given
    text       the value, not yet read
    start      how the value begins as it was typed
    """

    key: str
    type_name: str | None
    text: str
    start: str = field(default="", compare=False)


def parse_assignment(argument: str) -> Assignment:
    """Parse KEY=TYPE:VALUE, KEY=VALUE, or with the value in a file KEY=TYPE@FILE or KEY=@FILE.

        edit.parse_assignment("llama.context_length=u32:32768")

    raises  BadRequest if it is none of these, or if the file can't be read
    """
    key, equals, text = argument.partition("=")
    if not key or not equals:
        raise BadRequest(f"{argument!r}: expected KEY=TYPE:VALUE")
    if text.startswith("@"):
        try:
            return Assignment(key, None, text_of(read_input(text[1:])), text)
        except BadRequest as error:
            raise BadRequest(f"{error}; {key}=str:{text} is that text itself") from error
    match = _TYPED.fullmatch(text)
    if match is None or not (match["kind"] in _KINDS or match["kind"] in _VAGUE or match["array"]):
        return Assignment(key, None, text, f":{text[:20]}")
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


Action = Literal["set", "add", "remove", "rename key", "rename tensor"]


@dataclass(frozen=True)
class Change:
    """One thing that an edit changes.

    name      key or tensor, before
    old, new  the value of a key that is set, added or removed; None where there is none
    new_name  new name of a key or tensor that is renamed
    """

    action: Action
    name: str
    old: Value | None = None
    new: Value | None = None
    new_name: str | None = None

    def as_text(self) -> str:
        name = printable(self.name)
        if self.new_name is not None:
            return f"{self.action.removeprefix('rename ')} {name} -> {printable(self.new_name)}"
        if self.old is None:
            return f"{name}: added {_value_text(self.new)}"
        if self.new is None:
            return f"{name}: removed, was {_value_text(self.old)}"
        if self.old.type_name == self.new.type_name:
            return f"{name}: {value_text(self.old)} -> {value_text(self.new)}"
        return f"{name}: {_value_text(self.old)} -> {_value_text(self.new)}"

    def as_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"action": self.action, "name": self.name}
        if self.new_name is not None:
            return data | {"new_name": self.new_name}
        return data | {"old": _value_json(self.old), "new": _value_json(self.new)}


def _value_text(value: Value | None) -> str:
    return "nothing" if value is None else f"{value.type_name} {value_text(value)}"


def _value_json(value: Value | None) -> dict[str, Any] | None:
    return None if value is None else {"type": value.type_name, "value": value.plain}


@dataclass(frozen=True)
class Edited:
    """Result of an edit of a header.

    metadata   all metadata, changed or not
    new_names  tensor name -> new name, for those that change
    changes    in order; empty if nothing changes
    """

    metadata: dict[str, Value]
    new_names: dict[str, str] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()


Edit = Callable[[Metadata, Sequence[str]], Edited]
"""Function from metadata and tensor names to what an edit makes of them."""


# --- metadata -------------------------------------------------------------------------------


def set_values(metadata: Metadata, assignments: Iterable[Assignment], *, force: bool = False) -> Edited:
    """Set keys: a known one keeps its place, a new one goes to the end, before any `split.*` keys.

        changes = [edit.parse_assignment("general.name=Lite")]
        edit.edit_model("lite.gguf", lambda metadata, names: edit.set_values(metadata, changes))

    force   allow a kind that llama.cpp doesn't read the key as, and another architecture
    raises  BadRequest for a value that doesn't fit its type, and for what would break the file
    """
    new = dict(metadata)
    seen: set[str] = set()
    changes: list[Change] = []
    for assignment in assignments:
        key = assignment.key
        if key in seen:
            raise BadRequest(f"key {key!r} is given twice")
        seen.add(key)
        _refuse_split_key(key)
        old = metadata.get(key)
        value = parse_value(key, _type_name(metadata, assignment), assignment.text)
        if not force:
            _refuse_other_kind(metadata, key, value)
            _refuse_other_architecture(metadata, key, value)
        if value != old:
            new[key] = value
            changes.append(Change("add" if old is None else "set", key, old, value))
    return Edited(_split_keys_last(metadata, new), changes=tuple(changes))


def remove_keys(metadata: Metadata, names: Iterable[str]) -> Edited:
    """Remove keys.

        edit.edit_model("lite.gguf", lambda metadata, names: edit.remove_keys(metadata, ["general.url"]))

    raises  BadRequest for a key that isn't there, or that the file needs
    """
    names = list(dict.fromkeys(names))
    for key in names:
        _refuse_split_key(key)
        if key == keys.ARCHITECTURE:
            raise BadRequest(f"key {key!r} can't be removed: no program can read a model without it")
        if key not in metadata:
            raise BadRequest(f"no key {key!r}")
    left = {key: value for key, value in metadata.items() if key not in names}
    return Edited(left, changes=tuple(Change("remove", key, metadata[key]) for key in names))


def rename_keys(
    metadata: Metadata, renames: Iterable[tuple[str, str]], *, regex: bool = False, force: bool = False
) -> Edited:
    """Rename keys, which keep their places and values.

        renames = [("general.source.url", "general.url")]
        edit.edit_model("lite.gguf", lambda metadata, names: edit.rename_keys(metadata, renames))

    renames  (old, new); see `new_names_of`
    force    allow a new name that llama.cpp reads as another kind
    raises   BadRequest for names that are missing, taken or needed
    """
    new_names = new_names_of(list(metadata), renames, "key", regex=regex)
    for old, new in new_names.items():
        for key in (old, new):
            _refuse_split_key(key)
            if key in (keys.ARCHITECTURE, keys.ALIGNMENT):
                raise BadRequest(f"key {old!r} can't become {new!r}: use set and remove-key for {key}")
        if not force:
            _refuse_other_kind(metadata, new, metadata[old])
    renamed = {new_names.get(key, key): value for key, value in metadata.items()}
    changes = (Change("rename key", old, new_name=new) for old, new in new_names.items())
    return Edited(renamed, changes=tuple(changes))


def _type_name(metadata: Metadata, assignment: Assignment) -> str:
    """The type that was given, that the key has if llama.cpp reads it so, or that llama.cpp expects."""
    key, architecture = assignment.key, architecture_of(metadata) or ""
    if assignment.type_name is not None:
        return assignment.type_name
    expected = keys.expected_kinds(key, architecture)
    if key in metadata and metadata[key].type_name in (expected or (metadata[key].type_name,)):
        return metadata[key].type_name
    if not expected:
        raise BadRequest(f"key {key!r} is new: say its type, as in {key}=str{assignment.start}")
    return expected[0]


def _refuse_split_key(key: str) -> None:
    if key in SPLIT_KEYS:
        raise BadRequest(f"key {key!r} is only for split and merge: it holds a split set together")


def _refuse_other_kind(metadata: Metadata, key: str, value: Value) -> None:
    """Raise unless the value has the type that llama.cpp expects or, for other keys, the type of before."""
    architecture = architecture_of(metadata) or ""
    expected, reader = keys.kinds_instead(key, architecture, value.type_name), "llama.cpp reads"
    if key in metadata and not keys.expected_kinds(key, architecture):
        expected, reader = (metadata[key].type_name,), "the file has"
    if expected and value.type_name not in expected:
        raise BadRequest(
            f"key {key!r}: {value_text(value)} is {value.type_name}, {reader} {' or '.join(expected)}; "
            "use --force if you mean it"
        )


def _refuse_other_architecture(metadata: Metadata, key: str, value: Value) -> None:
    old = architecture_of(metadata) or ""
    if key != keys.ARCHITECTURE or value.data == old:
        return
    unread = next((name for name in metadata if name.startswith(old + ".")), None)
    if unread is not None:
        raise BadRequest(
            f"key {key!r}: with {value_text(value)} no program would read keys like {unread!r}; "
            "use --force if you mean it"
        )


def _split_keys_last(old: Metadata, new: dict[str, Value]) -> dict[str, Value]:
    """Move added keys in front of the `split.*` keys that end the metadata of a shard."""
    order = list(old)
    n_last = next((i for i, key in enumerate(reversed(order)) if key not in SPLIT_KEYS), len(order))
    last = order[len(order) - n_last :]
    return {key: value for key, value in new.items() if key not in last} | {key: new[key] for key in last}


# --- names ----------------------------------------------------------------------------------


def rename_tensors(
    metadata: Metadata, names: Sequence[str], renames: Iterable[tuple[str, str]], *, regex: bool = False
) -> Edited:
    """Rename tensors, which keep their places.

        renames = [(r"^model\\.", "")]
        edit.edit_model(
            "lite.gguf",
            lambda metadata, names: edit.rename_tensors(metadata, names, renames, regex=True),
        )

    raises  BadRequest for names that are missing or taken
    """
    new_names = new_names_of(names, renames, "tensor", regex=regex)
    changes = (Change("rename tensor", old, new_name=new) for old, new in new_names.items())
    return Edited(dict(metadata), new_names, tuple(changes))


def new_names_of(
    names: Sequence[str], renames: Iterable[tuple[str, str]], what: str, *, regex: bool
) -> dict[str, str]:
    """Return the new name of each name that changes, in the order of `names`.

    renames  (old, new), applied together, so that two names can be exchanged; with `regex` (pattern,
             replacement), each applied to every name wherever it matches, one after the other
    what     "key" or "tensor", for messages
    raises   BadRequest
    """
    if regex:
        new_names = _by_pattern(names, renames, what)
    else:
        new_names = _by_name(names, renames, what)
    after: dict[str, str] = {}
    for old in names:
        new = new_names.get(old, old)
        if not new:
            raise BadRequest(f"{what} {old!r} would have no name")
        if new in after:
            raise BadRequest(f"{what}s {after[new]!r} and {old!r} would both be {new!r}")
        after[new] = old
    return {old: new for new, old in after.items() if old != new}


def _by_name(names: Sequence[str], renames: Iterable[tuple[str, str]], what: str) -> Mapping[str, str]:
    known = set(names)
    new_names: dict[str, str] = {}
    for old, new in renames:
        if old not in known:
            raise BadRequest(f"no {what} {old!r}")
        if old in new_names:
            raise BadRequest(f"{what} {old!r} is given twice")
        new_names[old] = new
    return new_names


def _by_pattern(names: Sequence[str], renames: Iterable[tuple[str, str]], what: str) -> Mapping[str, str]:
    new_names = {name: name for name in names}
    for pattern, replacement in renames:
        expression = parse_expression(pattern)
        taken = [name for name, new in new_names.items() if expression.matches(new)]
        for name in taken:
            new_names[name] = expression.replaced(replacement, new_names[name])
        if not taken:
            raise BadRequest(f"{quoted(pattern)} matches no {what}")
    return new_names
