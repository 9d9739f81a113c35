"""Changing valid files a little: whole fields rather than bits, so that most get past the first check.

All functions take a `random.Random`, which may be hypothesis' own, and draw everything from it.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

Edit = Callable[[random.Random, list[bytes]], None]

INTEGERS = (
    0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 13, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256, 1000, 2**15, 2**16 - 1,
    2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40, 2**61, 2**62, 2**63 - 1, 2**63,
    2**64 - 32, 2**64 - 2, 2**64 - 1,
)  # fmt: skip
_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 255, 10**6, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, 10**12,
    10**40, 0.0, -0.0, 0.5, 1.5, 1e-30, 1e30, 1e308, float("inf"), float("-inf"), float("nan"), "", "a", " ",
    "\0", "\n", "\x1b[2J", "\ud800", "\U0010ffff", "../../etc/passwd", "/etc/passwd", "1", "true", "é" * 100,
    "(a+)+$", "a" * 5000, [], {}, [[]], [{}], [None], {"": None}, {"a": {"b": []}}, [1, 2, 3], ["a", "b"],
    {"type": "Sequence"}, {"content": "x"}, {"id": 1}, [0] * 300,
)  # fmt: skip


def segments(rng: random.Random, parts: Sequence[bytes], strangers: Sequence[bytes] = ()) -> bytes:
    """Return the fields `parts`, joined after one to four changes.

    strangers  fields of another file that may be inserted too
    """
    changed = list(parts)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if changed:
            rng.choice(_EDITS)(rng, changed)
        if strangers and rng.random() < 0.1:
            changed.insert(rng.randint(0, len(changed)), rng.choice(strangers))
    data = b"".join(changed)
    return data[: rng.randint(0, len(data))] if rng.random() < 0.1 else data


def _other_number(rng: random.Random, parts: list[bytes]) -> None:
    places = [index for index, part in enumerate(parts) if len(part) in _CODES]
    if places:
        index = rng.choice(places)
        width = len(parts[index])
        number = rng.choice(INTEGERS) % 256**width
        parts[index] = struct.pack(("<", ">")[rng.random() < 0.1] + _CODES[width], number)


def _near_number(rng: random.Random, parts: list[bytes]) -> None:
    places = [index for index, part in enumerate(parts) if len(part) in _CODES]
    if places:
        index = rng.choice(places)
        width = len(parts[index])
        number = int.from_bytes(parts[index], "little") + rng.choice((-32, -8, -1, 1, 8, 32))
        parts[index] = (number % 256**width).to_bytes(width, "little")


def _other_bytes(rng: random.Random, parts: list[bytes]) -> None:
    index = rng.randrange(len(parts))
    part = bytearray(parts[index])
    if part:
        for _ in range(rng.randint(1, 3)):
            part[rng.randrange(len(part))] = rng.choice((0, 1, 0x7F, 0x80, 0xC3, 0xFF, rng.randrange(256)))
        parts[index] = bytes(part)


def _drop(rng: random.Random, parts: list[bytes]) -> None:
    del parts[rng.randrange(len(parts))]


def _double(rng: random.Random, parts: list[bytes]) -> None:
    start = rng.randrange(len(parts))
    stop = start + rng.randint(1, 8)
    parts[stop:stop] = parts[start:stop]


def _swap(rng: random.Random, parts: list[bytes]) -> None:
    one, other = rng.randrange(len(parts)), rng.randrange(len(parts))
    parts[one], parts[other] = parts[other], parts[one]


_EDITS: tuple[Edit, ...] = (
    _other_number, _other_number, _other_number, _near_number, _other_bytes, _drop, _double, _swap,
)  # fmt: skip


# --- JSON -----------------------------------------------------------------------------------------------


def json_bytes(rng: random.Random, text: str) -> bytes:
    """Return the JSON `text`, which holds an object or a list, with one to three changes."""
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change(rng, value)
    data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return _spoiled(rng, data) if rng.random() < 0.1 else data


def _change(rng: random.Random, value: Any) -> None:
    """Change one thing somewhere inside `value`."""
    holders = [holder for holder in _holders(value) if holder]
    if not holders:
        return
    holder = rng.choice(holders)
    key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    kind = rng.random()
    if kind < 0.35:
        holder[key] = deepcopy(rng.choice(VALUES))
    elif kind < 0.6:
        values = [value for other in holders for value in _items(other) if type(value) is type(holder[key])]
        holder[key] = deepcopy(rng.choice(values))
    elif kind < 0.7:
        del holder[key]
    elif kind < 0.8:
        inner = holder[key]
        holder[key] = list(inner.values()) if isinstance(inner, dict) and inner else [inner]
    elif isinstance(holder, dict):
        holder[rng.choice((*_names(rng, value), "", "\0", "../x"))] = holder.pop(key)
    else:
        holder.insert(key, deepcopy(rng.choice((holder[key], rng.choice(VALUES)))))


def _items(holder: Any) -> list[Any]:
    return list(holder.values() if isinstance(holder, dict) else holder)


def _holders(value: Any) -> list[Any]:
    """Return the lists and objects in `value`, itself first; 2000 at most."""
    holders, todo = [], [value]
    while todo and len(holders) < 2000:
        item = todo.pop()
        if isinstance(item, dict | list):
            holders.append(item)
            todo.extend(_items(item))
    return holders


def _names(rng: random.Random, value: Any) -> list[str]:
    """Return the keys of a random object in `value`."""
    objects = [holder for holder in _holders(value) if isinstance(holder, dict)]
    return list(rng.choice(objects)) if objects else []


def _spoiled(rng: random.Random, data: bytes) -> bytes:
    """Return `data` with a change that no tree of values can express."""
    where = rng.randint(0, len(data))
    return rng.choice(
        (
            data[:where],
            b"\xef\xbb\xbf" + data,
            data[:where] + b"\xff" + data[where:],
            data[:where] + data[max(0, where - 20) :],
            b"[" * 3000 + data,
            data.replace(b":", b":" + b'{"a":' * 1500, 1),
            data.decode("utf-8", "replace").encode("utf-16"),
            data + b"\0",
            data.replace(b"0", b"0" * 5000, 1),
            b'{"' + data[1:],
        )
    )
