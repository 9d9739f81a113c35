"""What a scan finds: how bad it is, where it is, and what it is, in text that is safe to print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from gguf_tools.text import printable, quoted

MAX_PER_CHECK = 10
MAX_WHERE = 200


class Level(IntEnum):
    """How bad a finding is.

    NOTE     common in honest files, and worth knowing
    WARNING  rare in honest files: look at it before you load the file
    BAD      made to do harm, or so broken that llama.cpp stops: don't load the file
    """

    NOTE = 0
    WARNING = 1
    BAD = 2

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Finding:
    """One suspicious thing.

    level  see Level
    check  what was looked for, a short name that stays the same from version to version
    where  the key or tensor, "" for the file as a whole; as stored, so print it through `as_text`
    text   what was found; strangers' text in it has gone through `quoted`
    file   which file of a split set, "" for the model as a whole
    """

    level: Level
    check: str
    where: str
    text: str
    file: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "level": str(self.level), "check": self.check, "file": self.file, "where": self.where,
            "text": self.text,
        }  # fmt: skip

    def as_text(self) -> str:
        """The finding on one line, without control characters."""
        where = self.where if len(self.where) <= MAX_WHERE else f"{self.where[:MAX_WHERE]}..."
        parts = [str(self.level), printable(self.file), printable(where), self.text]
        return ": ".join(part for part in parts if part)


def listed(texts: Iterable[str], limit: int = 5) -> str:
    """Quoted texts behind each other, the first ones of many."""
    all_texts = list(texts)
    shown = ", ".join(quoted(text, 40) for text in all_texts[:limit])
    return shown if len(all_texts) <= limit else f"{shown} and {len(all_texts) - limit:,} more"


def capped(findings: Iterable[Finding], limit: int = MAX_PER_CHECK) -> Iterator[Finding]:
    """The findings, at most `limit` of a check at one level, and then one that counts the others."""
    seen: Counter[tuple[str, Level]] = Counter()
    for finding in findings:
        seen[finding.check, finding.level] += 1
        if seen[finding.check, finding.level] <= limit:
            yield finding
    for (check, level), count in seen.items():
        if count > limit:
            yield Finding(level, check, "", f"{count - limit:,} more of the kind ({check}) are not shown")
