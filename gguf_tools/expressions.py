"""Regular expressions of users, and of strangers whose recipes users pass on.

An expression can take time that is exponential in the length of a name. Python's own module can't be told to
give up; the `regex` library can, and matches the same. What an expression is, `re` decides: each is compiled
by it first, so that none of the other's own notations means anything here.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gguf_tools.errors import BadRequest, ToolkitError
from gguf_tools.text import cut_short, quoted

MAX_CHARS = 1 << 16
"""Characters of the longest expression: one that lists every tensor of a large model has half as many."""

MAX_COUNT = 1_000_000
"""The product of the counts in braces: `regex` writes each repetition out, and names have 1024 bytes."""

PATIENCE = 2.0
"""Seconds of computing that the slow matches of an expression may take together."""

_SLOW = 0.005

_BRACE = re.compile(r"\\N\{[^}]*\}|\\.|\{(?!(?:\d+,?\d*|,\d*)\})", re.DOTALL)
"""A brace that counts nothing: it stands for itself in `re`, and begins an inexact match in `regex`."""


@dataclass
class _Used:
    """The answers of an expression, by name, and the seconds that slow ones took."""

    answers: dict[str, bool] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Expression:
    """A regular expression that gives up in time.

    text   as it was written
    place  where it was, for messages: "FILE: line 3: "
    """

    text: str
    ignore_case: bool = False
    place: str = field(default="", compare=False)
    _used: _Used = field(default_factory=_Used, compare=False, repr=False)

    def matches(self, name: str) -> bool:
        """Whether a part of `name` matches; raises BadRequest when that takes too long."""
        answers = self._used.answers
        if name not in answers:
            answers[name] = self._in_time(lambda left: self.compiled.search(name, timeout=left)) is not None
        return answers[name]

    def replaced(self, replacement: str, name: str) -> str:
        r"""Return `name` with all matches replaced; `\1` stands for the first group.

        raises  BadRequest for a group that the expression lacks, and when it takes too long
        """
        try:
            return str(self._in_time(lambda left: self.compiled.sub(replacement, name, timeout=left)))
        except BadRequest:
            raise
        except Exception as error:  # the library's own, IndexError and others
            why = f"can't be replaced by {quoted(replacement)} ({cut_short(str(error))})"
            raise BadRequest(f"{self.place}{quoted(self.text)} {why}") from error

    def _in_time(self, match: Callable[[float], Any]) -> Any:
        start = time.thread_time()
        try:
            return match(max(PATIENCE - self._used.seconds, _SLOW))
        except TimeoutError as error:
            raise BadRequest(
                f"{self.place}{quoted(self.text)} takes more than {PATIENCE:g} s to match names, expected an"
                " expression without repetitions inside of repetitions"
            ) from error
        finally:
            seconds = time.thread_time() - start
            self._used.seconds += seconds if seconds > _SLOW else 0

    @cached_property
    def compiled(self) -> Any:
        """The expression as an object of the `regex` library."""
        import regex

        exact = _BRACE.sub(lambda found: "\\{" if found[0] == "{" else found[0], self.text)
        return regex.compile(exact, regex.VERSION0 | (regex.IGNORECASE if self.ignore_case else 0))


def parse_expression(
    text: str, *, place: str = "", ignore_case: bool = False, error: type[ToolkitError] = BadRequest
) -> Expression:
    """Read a regular expression in the notation of Python's `re`.

    place   where it was, for messages: "FILE: line 3: "
    raises  `error` for what is none, and for one that can't match a name in any reasonable time
    """
    expression = Expression(text, ignore_case, place)
    try:
        if len(text) > MAX_CHARS:
            raise ValueError(f"{len(text):,} characters, expected at most {MAX_CHARS:,}")
        re.compile(text, re.IGNORECASE if ignore_case else 0)
        if math.prod(max(1, int(count)) for count in re.findall(r"\{(\d+)", text)) > MAX_COUNT:
            raise ValueError(f"counts to more than {MAX_COUNT:,}")
        _ = expression.compiled
    except RecursionError as cause:
        raise error(f"{place}{quoted(text)} is not a regular expression (nested too deeply)") from cause
    except Exception as cause:  # the libraries raise errors of their own, and many others
        raise error(f"{place}{quoted(text)} is not a regular expression ({cut_short(str(cause))})") from cause
    return expression
