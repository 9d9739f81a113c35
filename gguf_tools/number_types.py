"""Numbers that users choose: what each kind may be, for options of commands and for arguments of functions.

THREADS.parse("8")              # as a command line has it; raises BadArgument
n_threads: Threads | None       # as a function or options declare it; see argument_types.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any

from gguf_tools.errors import BadArgument
from gguf_tools.text import quoted

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
PositiveBytes = Annotated[int, NumberType(1, 1 << 60)]
