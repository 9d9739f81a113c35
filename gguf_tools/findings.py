"""Findings: what a check, a plan or a scan has to tell the user, as values and as text that is safe to print.

In a command they are printed on standard error. Elsewhere they go to the logger `gguf_tools`, unless a `tell`
is given: notes as INFO, warnings as WARNING, what is bad as ERROR.

A scan's finding is about one key or tensor, by its stored name, so it is printed through `as_text`. In its
text, nothing controls a terminal, whatever names are in it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from gguf_tools.choices import in_command, spoken
from gguf_tools.errors import ToolkitError
from gguf_tools.text import printable, quoted, say_aside


class Level(IntEnum):
    """How bad a finding is.

    NOTE     common and harmless, but worth knowing
    WARNING  uncommon: look at it before you go on
    BAD      going on would fail, or do harm
    """

    NOTE = 0
    WARNING = 1
    BAD = 2

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Finding:
    """One thing to tell the user.

    kind   what was looked for: a short name for programs, the same from version to version
    text   the finding in words, without a full stop
    level  how bad it is
    about  tensors or keys that the finding concerns, all of them; empty for a whole file
    file   file of a split set that the finding concerns; empty for the model as a whole
    error  error that ends a run because of the finding; None if the run goes on
    """

    kind: str
    text: str
    level: Level = Level.WARNING
    about: tuple[str, ...] = ()
    file: str = ""
    error: type[ToolkitError] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", printable(spoken(self.text)))

    @classmethod
    def stopping(
        cls, kind: str, text: str, error: type[ToolkitError], about: tuple[str, ...] = ()
    ) -> Finding:
        """Return a finding that ends a run with `error`."""
        return cls(kind, text, Level.BAD, about, error=error)

    @property
    def stops(self) -> bool:
        """Whether a run would end because of the finding."""
        return self.error is not None

    @property
    def is_bad(self) -> bool:
        """Whether going on would fail, or do harm."""
        return self.level is Level.BAD

    @property
    def tensors(self) -> tuple[str, ...]:
        """Tensors that a finding of a plan is about, by their names in the output."""
        return self.about

    @property
    def where(self) -> str:
        """The first tensor or key that the finding concerns, "" for a whole file."""
        return self.about[0] if self.about else ""


Tell = Callable[[Finding], object]
"""Is told what a user should know before work begins."""


LOGGER = logging.getLogger("gguf_tools")
"""Where findings go outside of commands."""


def tell_nobody(finding: Finding) -> None:
    """Ignore a finding, which another call tells."""


def log(finding: Finding) -> None:
    """Log a finding; the record has it as its `finding`."""
    levels = {Level.NOTE: logging.INFO, Level.WARNING: logging.WARNING, Level.BAD: logging.ERROR}
    LOGGER.log(levels[finding.level], finding.text, extra={"finding": finding})


def remark(text: str) -> None:
    """Say what work has come across: on standard error in a command, to the logger elsewhere."""
    if in_command():
        say_aside(text)
    else:
        log(Finding("remark", text))


def tell_all(findings: Iterable[Finding], tell: Tell) -> None:
    """Tell one finding after the other."""
    for finding in findings:
        tell(finding)


def teller(*, quiet: bool) -> Tell:
    """Return a function that prints findings on standard error in a command, and logs them elsewhere.

    quiet  print only bad ones
    """

    def tell(finding: Finding) -> None:
        if not in_command():
            log(finding)
        elif finding.is_bad or not quiet:
            word = "note" if finding.level is Level.NOTE else "warning"
            say_aside(f"{word}: {finding.text}")

    return tell


MAX_PER_CHECK = 10
MAX_WHERE = 200


def as_json(finding: Finding) -> dict[str, Any]:
    return {
        "level": str(finding.level), "check": finding.kind, "file": finding.file, "where": finding.where,
        "text": finding.text,
    }  # fmt: skip


def as_text(finding: Finding) -> str:
    """Return the finding on one line, without control characters."""
    where = finding.where if len(finding.where) <= MAX_WHERE else f"{finding.where[:MAX_WHERE]}..."
    parts = [str(finding.level), printable(finding.file), printable(where), finding.text]
    return ": ".join(part for part in parts if part)


def listed(texts: Iterable[str], limit: int = 5) -> str:
    """Return the first few texts, quoted and with commas between them, and how many more there are."""
    all_texts = list(texts)
    shown = ", ".join(quoted(text, 40) for text in all_texts[:limit])
    return shown if len(all_texts) <= limit else f"{shown} and {len(all_texts) - limit:,} more"


def capped(findings: Iterable[Finding], limit: int = MAX_PER_CHECK) -> Iterator[Finding]:
    """Yield at most `limit` findings of a kind at each level, and then one that counts the others."""
    seen: Counter[tuple[str, Level]] = Counter()
    for finding in findings:
        seen[finding.kind, finding.level] += 1
        if seen[finding.kind, finding.level] <= limit:
            yield finding
    for (kind, level), count in seen.items():
        if count > limit:
            yield Finding(kind, f"{count - limit:,} more of the kind ({kind}) are not shown", level)
