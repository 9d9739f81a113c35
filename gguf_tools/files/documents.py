"""Documents in YAML and JSON: suites, recipes, losses, reports, chats, and the JSON of checkpoints.

They may come from strangers. Memory, nesting and what aliases multiply are bounded, a key given twice is
refused, and so is what no Python value can be made of. Every mistake in YAML has its line, from one reading.

JSON of checkpoints is read as `json` reads it, within the bounds; `strict` is for what we define ourselves.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf_tools.errors import BadRequest, ToolkitError
from gguf_tools.files.named_files import read_input_text
from gguf_tools.text import cut_short, is_whole, quoted

MAX_MEMORY = 160 << 20
"""Bytes that what a file says may take in memory, but for tokenizers."""

MAX_NESTING = 100

MAX_YAML = 1 << 19
"""Characters of YAML, which takes its reader some four seconds."""

MAX_VALUES = 100_000
"""Values of a document in YAML, counted as often as aliases repeat them."""

MAX_DIGITS = 300
"""Digits of a number: the largest float has 309, and Python writes no whole number of more than 4300."""

# What JSON becomes, in bytes at most; with a hook, the pairs of an object are in a list and in a dictionary.
_OBJECT_MEMORY = 200
_LIST_MEMORY = 72
_PAIR_MEMORY = 160
_ITEM_MEMORY = 50


def read_document(
    path: str | os.PathLike[str], error: type[ToolkitError] = BadRequest, *, unless: str = ""
) -> Any:
    """Return the value of a file in YAML, if its name says so, or JSON.

    unless  what a file that is no JSON is not, for the message: "not a losses file"
    raises  `error`, with the line where there is one, for what is wrong in it; BadRequest for a file that
            can't be read
    """
    text = read_input_text(path)
    if Path(path).suffix.lower() in (".yaml", ".yml"):
        return parse_yaml(path, text, error)
    try:
        return parse_json(text.removeprefix("\ufeff").encode(), strict=True)
    except json.JSONDecodeError as cause:
        why = f"line {cause.lineno}, column {cause.colno}: {cause.msg}"
        raise error(": ".join(filter(None, (str(path), unless, why)))) from cause
    except ValueError as cause:
        raise error(": ".join(filter(None, (str(path), unless, str(cause))))) from cause


def count_at(entry: Any, key: str) -> int:
    """Return a whole number from 1 that 63 bits hold, as JSON or, where it is large, as a text of digits.

    raises  ValueError for another value, KeyError or TypeError where there is none
    """
    value = entry[key]
    found = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else value
    if type(found) is not int or not 0 < found < 1 << 63:
        raise ValueError(f"{key} is {quoted(value)}, expected a whole number from 1 to {(1 << 63) - 1}")
    return found


def number_at(entry: Any, key: str, *, may_be_unknown: bool = False) -> float:
    """Return a finite number; raises ValueError for another value, KeyError or TypeError for none.

    may_be_unknown  it may be the text "nan", which stands for NaN in our reports
    """
    value = entry[key]
    if may_be_unknown and value == "nan":
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} is {quoted(value)}, expected a finite number")
    return float(value)


# ---- JSON


def parse_json(
    data: bytes,
    objects: Callable[[list[tuple[str, Any]]], Any] | None = None,
    *,
    strict: bool = False,
    most_memory: int = MAX_MEMORY,
) -> Any:
    """Return the value of JSON in UTF-8.

    objects      makes an object of its pairs, as in json.loads
    strict       refuse keys given twice, numbers that are not finite or have more than MAX_DIGITS digits, and
                 halves of characters (lone surrogates)
    most_memory  bytes that the value may take
    raises       ValueError for anything else, for JSON that would take more memory, and for lists and objects
                 nested deeper than MAX_NESTING
    """
    if not data.isascii():
        _check_memory(5 * len(data), most_memory)
    text = data.decode("utf-8")
    # The content is held as bytes, as one text, and as the texts in it, which a single \u widens throughout.
    in_texts = 4 * len(text) if b"\\u" in data else sys.getsizeof(text)
    _check_memory(
        len(data)
        + sys.getsizeof(text)
        + in_texts
        + _OBJECT_MEMORY * data.count(b"{")
        + _LIST_MEMORY * data.count(b"[")
        + _PAIR_MEMORY * data.count(b":")
        + _ITEM_MEMORY * data.count(b","),
        most_memory,
    )
    try:
        if strict:
            _refuse_halves(text)
            value = _strict_json(text)
        else:
            value = json.loads(text, object_pairs_hook=objects)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if data.count(b"[") + data.count(b"{") > MAX_NESTING:
        _check_nesting(value)
    return value


def _strict_json(text: str) -> Any:
    def number(digits: str) -> float:
        made = float(digits) if len(digits) <= MAX_DIGITS else math.inf
        if not math.isfinite(made):
            why = f"{quoted(digits, 20)} is no finite number of at most {MAX_DIGITS} digits"
            raise json.JSONDecodeError(why, text, text.find(digits))
        return made

    def whole(digits: str) -> int:
        number(digits)
        return int(digits)

    return json.loads(
        text, object_pairs_hook=_once, parse_int=whole, parse_float=number, parse_constant=number
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of pairs whose keys differ."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"key {quoted(key)} is given twice, expected once")
        made[key] = value
    return made


_ESCAPE = re.compile(r"\\u[dD][89aAbB]..\\u[dD][c-fC-F]|(\\u[dD][89a-fA-F])|\\.", re.DOTALL)


def _refuse_halves(text: str) -> None:
    if "\\u" not in text:
        return
    for found in _ESCAPE.finditer(text):
        if found[1]:
            raise json.JSONDecodeError("half of a character (a lone surrogate)", text, found.start())


_TOO_DEEP = f"lists and objects are nested deeper than {MAX_NESTING}"


def _check_nesting(value: Any) -> None:
    """Raise ValueError for nesting in which a recursive reader could exhaust the stack."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            item
            for holder in level
            if isinstance(holder, dict | list)
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _check_memory(n_bytes: int, most: int) -> None:
    if n_bytes > most:
        raise ValueError(f"would take more than {most >> 20} MiB of memory")


# ---- YAML


class Keys(dict[Any, Any]):
    """A mapping of YAML that knows the lines of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, int] = {}

    def put(self, key: Any, value: Any, line: int) -> None:
        self[key], self.lines[key] = value, line


def line_of(value: Any, path: Sequence[str]) -> int:
    """Find the line of a key in what `parse_yaml` has returned, or of the last that is there of `path`."""
    line = 1
    for name in path:
        if not isinstance(value, Keys) or name not in value:
            break
        line, value = value.lines[name], value[name]
    return line


def parse_yaml(path: str | os.PathLike[str], text: str, error: type[ToolkitError] = BadRequest) -> Any:
    """Return the value of a text in YAML: texts, numbers, truth values, lists and `Keys`.

    A merge key (<<) adds the keys of other mappings that are not there.

    path    of the file, for messages
    raises  `error` with the line, for what is no YAML, dates and tags, a key given twice, and what is larger
            than the bounds
    """
    import yaml

    try:
        if len(text) > MAX_YAML:
            raise error(f"{path}: {len(text):,} characters of YAML, expected at most {MAX_YAML:,}")
        return _Composer(yaml.SafeLoader(text)).document()
    except yaml.MarkedYAMLError as cause:
        mark = cause.problem_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise error(f"{path}: {place}{cut_short(cause.problem or 'not YAML')}") from cause
    except _Wrong as cause:
        raise error(f"{path}: {cause}") from cause
    except (yaml.YAMLError, ValueError) as cause:  # PyYAML takes any number for a version of YAML
        raise error(f"{path}: not YAML ({cut_short(' '.join(str(cause).split()))})") from cause


class _Wrong(ValueError):
    """A mistake, told with its line."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line}: {why}")


@dataclass(slots=True)
class _Node:
    """A value.

    n_values  how many there are in it, aliases written out
    is_merge  it is <<
    """

    line: int
    value: Any
    n_values: int = 1
    is_merge: bool = False


@dataclass(slots=True)
class _Open:
    """A list or a mapping whose end is not reached."""

    line: int
    is_mapping: bool
    anchor: str | None
    items: list[_Node] = field(default_factory=list)

    def closed(self) -> _Node:
        value = self._mapping() if self.is_mapping else [item.value for item in self.items]
        return _Node(self.line, value, 1 + sum(item.n_values for item in self.items))

    def _mapping(self) -> Keys:
        own, made = Keys(), Keys()
        merged: list[_Node] = []
        for key, item in zip(self.items[::2], self.items[1::2], strict=True):
            if key.is_merge:
                merged.append(item)
            elif isinstance(key.value, list | dict):
                raise _Wrong(key.line, f"a key is {quoted(key.value)}, expected a text")
            elif key.value in own:
                raise _Wrong(key.line, f"key {quoted(key.value)} is given twice, expected once")
            else:
                own.put(key.value, item.value, key.line)
        for item in merged:
            for parent in item.value if isinstance(item.value, list) else [item.value]:
                if not isinstance(parent, Keys):
                    raise _Wrong(item.line, f"<< is {quoted(parent)}, expected keys")
                for key in parent:
                    if key not in own and key not in made:
                        made.put(key, parent[key], parent.lines[key])
        for key in own:
            made.put(key, own[key], own.lines[key])
        return made


class _Composer:
    """Makes the value of a document, out of what PyYAML's parser finds one after the other."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._anchors: dict[str, _Node | None] = {}

    def document(self) -> Any:
        found = list(self._roots())
        if len(found) > 1:
            raise _Wrong(found[1].line, "another document begins, expected one")
        return found[0].value if found else None

    def _roots(self) -> Iterator[_Node]:
        import yaml

        open_: list[_Open] = []
        while self._loader.check_event():
            event = self._loader.get_event()
            line = event.start_mark.line + 1
            if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                if event.tag not in (None, "!", _TAG + ("map" if is_mapping else "seq")):
                    raise _Wrong(line, f"could not determine a constructor for the tag {quoted(event.tag)}")
                if len(open_) == MAX_NESTING:
                    raise _Wrong(line, _TOO_DEEP)
                open_.append(_Open(line, is_mapping, event.anchor))
                self._keep(event.anchor, None)
                continue
            if isinstance(event, yaml.AliasEvent):
                node = self._aliased(line, event.anchor)
            elif isinstance(event, yaml.ScalarEvent):
                node = self._scalar(line, event)
                self._keep(event.anchor, node)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._keep(open_[-1].anchor, node := open_.pop().closed())
            else:
                continue
            if node.n_values > MAX_VALUES:
                raise _Wrong(node.line, f"more than {MAX_VALUES:,} values with what aliases repeat")
            if open_:
                open_[-1].items.append(node)
            else:
                yield node

    def _keep(self, anchor: str | None, node: _Node | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = node

    def _aliased(self, line: int, anchor: str) -> _Node:
        if anchor not in self._anchors:
            raise _Wrong(line, f"nothing before is called {quoted('&' + anchor)}")
        found = self._anchors[anchor]
        if found is None:
            raise _Wrong(line, f"{quoted('*' + anchor)} is inside of what it stands for")
        return _Node(line, found.value, found.n_values)

    def _scalar(self, line: int, event: Any) -> _Node:
        import yaml

        tag = event.tag
        if tag in (None, "!"):
            tag = self._loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        kind = tag.removeprefix(_TAG)
        if kind == "timestamp":
            raise _Wrong(line, f"{quoted(event.value)} is a date in YAML; put a text that looks so in quotes")
        if kind not in _KINDS:
            raise _Wrong(line, f"could not determine a constructor for the tag {quoted(tag)}")
        node = yaml.ScalarNode(_TAG + _KINDS[kind][0], event.value)
        try:
            if kind in ("int", "float") and len(event.value) > MAX_DIGITS:
                raise ValueError
            value = self._loader.construct_object(node)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError
        except Exception as cause:  # PyYAML checks little of what a tag says
            raise _Wrong(line, f"{quoted(event.value)} is no {_KINDS[kind][1]}") from cause
        if isinstance(value, str) and not is_whole(value):
            raise _Wrong(line, "half of a character (a lone surrogate)")
        return _Node(line, value, is_merge=kind == "merge")


_TAG = "tag:yaml.org,2002:"
_KINDS = {
    "str": ("str", "text"), "merge": ("str", "text"), "value": ("str", "text"), "null": ("null", "null"),
    "bool": ("bool", "truth value, expected true or false"), "int": ("int", "whole number"),
    "float": ("float", f"finite number of at most {MAX_DIGITS} digits"),
}  # fmt: skip
"""Kind of a scalar -> PyYAML's name for what is made of it, and a name for people."""
