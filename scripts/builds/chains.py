"""A chain of command lines that run in one folder, one after the other."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

PROGRAMS = ("convert-hf-to-gguf", "quantize", "imatrix", "evaluate", "sensitivity", "gguf-tools")


@dataclass(frozen=True)
class Command:
    """One command line: variables of the environment, then the words, as a shell would take them."""

    line: str

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The program and its arguments."""
        words = shlex.split(self.line)
        return tuple(words[len(self.variables) :])

    @cached_property
    def variables(self) -> Mapping[str, str]:
        """What stands before the program: `PYTHONPATH=no-torch imatrix ...`."""
        found: dict[str, str] = {}
        for word in shlex.split(self.line):
            if re.match(r"[A-Z_]+=", word) is None:
                break
            name, _, found[name] = word.partition("=")
        return found


@dataclass(frozen=True)
class Chain:
    """Command lines that share a folder, so that one may read what another has written.

    name   of the chain, and of its folder
    lines  what is typed
    apart  whether what a line has made is removed before the next, so that each stands alone
    """

    name: str
    lines: tuple[str, ...]
    apart: bool = False

    @property
    def commands(self) -> Iterator[Command]:
        return map(Command, self.lines)

    def mentions(self) -> set[str]:
        """Return every piece of a word that could be the name of an input: `a=b@c` has three.

        A part of a split set stands for all of them.
        """
        words = [word for one in self.commands for word in (*one.variables.values(), *one.words)]
        pieces = {piece for word in words for piece in (word, *re.split(r"[=@:,/]", word))}
        return pieces | {part for piece in pieces for part in _parts(piece)}


def _parts(name: str) -> Iterator[str]:
    match = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.gguf", name)
    for number in range(int(match[2]) if match else 0):
        yield f"{match[1]}-{number + 1:05d}-of-{match[2]}.gguf"


def chain(name: str, lines: str | Iterable[str], *, apart: bool = False) -> Chain:
    """Make a chain of the lines of a text; empty ones and those that begin with # say nothing."""
    split = lines.splitlines() if isinstance(lines, str) else lines
    stripped = (line.strip() for line in split)
    kept = tuple(line for line in stripped if line and not line.startswith("#"))
    return Chain(name, kept, apart)
