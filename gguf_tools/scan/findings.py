"""How a scan says what it finds: findings as text that is safe to print, and as JSON.

A note is common in honest files; a warning is rare in them: look at it before you load the file. What is bad
was made to do harm, or is so broken that llama.cpp stops: don't load the file.

A scan's finding is about one key or tensor, by its stored name, so it is printed through `as_text`. Text from
the file has gone through `quoted`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from gguf_tools.findings import Finding, Level
from gguf_tools.text import printable, quoted

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
