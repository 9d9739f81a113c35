"""Findings: what a check, a plan or a scan has to tell the user, as values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from gguf_tools.errors import ToolkitError


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
        return self.level is Level.BAD

    @property
    def tensors(self) -> tuple[str, ...]:
        """What a finding of a plan is about: tensors, by their names in the output."""
        return self.about

    @property
    def where(self) -> str:
        """The first tensor or key that the finding concerns, "" for a whole file."""
        return self.about[0] if self.about else ""


Tell = Callable[[Finding], object]
"""Is told what a user should know before work begins."""


def tell_nobody(finding: Finding) -> None:
    """Ignore a finding."""


def teller(*, quiet: bool) -> Tell:
    """Return a function that prints findings on standard error.

    quiet  only bad ones
    """

    def tell(finding: Finding) -> None:
        if finding.is_bad or not quiet:
            word = "note" if finding.level is Level.NOTE else "warning"
            print(f"{word}: {finding.text}", file=sys.stderr, flush=True)

    return tell
