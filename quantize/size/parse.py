"""Sizes that people ask for: 12.5GiB, 3.4bpw, or the name of a file type for "as large as that"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from gguf_tools.argument_types import BITS, SIZE, NumberType
from gguf_tools.errors import BadArgument, BadRequest
from gguf_tools.text import quoted
from quantize.plan.recipes import find_recipe

_UNITS = {
    "": 1, "B": 1,
    "K": 1 << 10, "KIB": 1 << 10, "KB": 10**3,
    "M": 1 << 20, "MIB": 1 << 20, "MB": 10**6,
    "G": 1 << 30, "GIB": 1 << 30, "GB": 10**9,
    "T": 1 << 40, "TIB": 1 << 40, "TB": 10**12,
}  # fmt: skip
_LEAST_BYTES = 10**4
"""Bytes below which a number without a unit was hardly meant to be bytes."""

_NUMBER = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-zA-Z]*)")


@dataclass(frozen=True)
class Size:
    """The size that a file may have.

    kind    "bytes", "bpw" (bits per weight, of all tensors) or "recipe"
    amount  bytes or bits; 0 for a recipe
    recipe  name of the file type whose size it is
    """

    kind: Literal["bytes", "bpw", "recipe"]
    amount: float = 0.0
    recipe: str = ""


def names_size(word: str) -> bool:
    """Tell whether a word where a file type may stand is a size.

    >>> [names_size(word) for word in ("3.4bpw", "12GiB", "Q4_K_M", "7", "3bits.yaml")]
    [True, True, False, False, False]
    """
    match = _NUMBER.fullmatch(word)
    return match is not None and bool(match[2])


def parse_size(text: str) -> Size:
    """Return the size that `text` means.

        12.5GiB, 700M, 13500000000     of the file; K, M, G and T are powers of 1024, KB ... of 1000.
                                       Without a unit they are bytes, at least 10,000
        3.4bpw                         bits per weight
        Q4_K_M                         what this file type makes of the model

    raises  BadRequest for anything else, and for a size that is not above 0
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        try:
            return Size("recipe", recipe=find_recipe(text).name)
        except BadRequest as error:
            raise BadArgument(f"size {quoted(text)}: expected one like 12.5GiB, 3.4bpw or Q4_K_M") from error
    amount, unit = float(match[1]), match[2].upper()
    if unit == "BPW":
        return Size("bpw", _in_range(text, amount, BITS))
    if not unit and amount < _LEAST_BYTES:
        meant = f"is {match[1]}bpw (bits per weight) or {match[1]}GiB meant?"
        raise BadArgument(f"size {quoted(text)}: expected a unit; {meant}")
    if unit not in _UNITS:
        raise BadArgument(f"size {quoted(text)}: unknown unit {match[2]!r}, expected one like GiB, MB or bpw")
    return Size("bytes", _in_range(text, amount * _UNITS[unit], SIZE))


def parse_sizes(text: str) -> tuple[Size, ...]:
    """Read several sizes with commas between them, as `parse_size`."""
    return tuple(map(parse_size, text.split(",")))


def parse_bytes(text: str) -> int:
    """Read a size in bytes; raises BadArgument for anything else."""
    size = parse_size(text)
    if size.kind != "bytes":
        raise BadArgument(f"{quoted(text)}: expected bytes, for instance 24GiB")
    return int(size.amount)


def _in_range(text: str, amount: float, kind: NumberType) -> float:
    if not kind.holds(amount):
        raise BadArgument(f"size {quoted(text)}: expected {kind}")
    return amount
