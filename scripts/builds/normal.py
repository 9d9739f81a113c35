"""What is set aside before two outcomes are compared, and where they differ after that.

Two runs of one build differ in these, and nothing else is touched:

    times     "in 1.1 s", and of those what compiling kernels took, which a run does once; "seconds" in JSON;
              19 digits in quotes, which are a file's time in the records of cook
    space     "66.58 GiB are free"
    bytes of NAME.partial and NAME.journal, which a run leaves that fails half-way: threads read, encode and
              write side by side, so what is done by then is chance. Their sizes count.
    speeds    "20.78 MiB a second"
    versions  "gguf-tools 0.1.0", and of the other commands
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from operator import eq

from scripts.builds.chains import PROGRAMS
from scripts.builds.outcomes import Outcome

_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\d[\d.,]* (?:[KMGT]i?)?(B|tokens|rows) a second", r"SPEED \1 a second"),
        (r", \d[\d.,]* s of them for compiling kernels, once", ""),
        (r'"((?:compile_)?seconds)": [\d.e-]+', r'"\1": TIME'),
        (r'"\d{19}"', '"TIME"'),
        (r"\(\d[\d.]* [KMGT]?i?B are free\)", "(SPACE are free)"),
        (r"\bin \d[\d.,]* (s|min|h)\b", "in TIME"),
        (rf"\b({'|'.join(PROGRAMS)}) \d+\.\d+\.\d+[\w.+-]*\b", r"\1 VERSION"),
    )
)


_UNFINISHED = (".partial", ".journal")


@dataclass(frozen=True)
class Difference:
    """Where two outcomes of a case differ.

    case  chain and command line
    what  "exit code", "standard output", "standard error", or a file's name
    old   first line, or description, that differs
    new   what stands in its place
    """

    case: str
    what: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.case}\n    {self.what}\n      - {self.old}\n      + {self.new}"


def normal(text: str) -> str:
    """Set times, speeds and versions in a text aside."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def differences(old: Outcome, new: Outcome) -> Iterator[Difference]:
    """Yield what differs between the outcomes of one case."""
    pairs = [("exit code", str(old.code), str(new.code))]
    pairs += [("standard output", old.out, new.out), ("standard error", old.err, new.err)]
    pairs += [
        (name, _file(old, name), _file(new, name)) for name in sorted(old.files.keys() | new.files.keys())
    ]
    for what, before, after in pairs:
        if before != after and (found := _first(normal(before), normal(after))):
            yield Difference(old.case, what, *found)


def _file(outcome: Outcome, name: str) -> str:
    """Return what has become of a file; of an unfinished one, only its size."""
    seen = outcome.files.get(name, "(not touched)")
    return re.sub("^sha256 [0-9a-f]+", "unfinished", seen) if name.endswith(_UNFINISHED) else seen


def _first(old: str, new: str) -> tuple[str, str] | None:
    """Return the first lines that differ, with their number, or None."""
    for number, (before, after) in enumerate(zip_longest(old.split("\n"), new.split("\n")), 1):
        if before != after:
            same = len(list(takewhile(bool, map(eq, before or "", after or ""))))
            return _line(number, before, same), _line(number, after, same)
    return None


def _line(number: int, line: str | None, n_same: int) -> str:
    """Return a line with its number; a long one from a little before the place where it differs."""
    if line is None:
        return "(no such line)"
    begin = max(0, n_same - 60) if len(line) > 300 else 0
    return f"{number}: {'... ' if begin else ''}{line[begin : begin + 300]}"
