"""Result of an audit, as a value, as lines for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from convert.audit.diagnose import Diagnosis
from convert.audit.expected import Encoder
from gguf_tools.findings import MAX_WHERE, Finding, Level, capped
from gguf_tools.lazy import late
from gguf_tools.text import cut_short, html_table, in_layer_ranges, printable, table

MOST_SHOWN = 25
"""Findings of a kind that a terminal gets; the JSON and the page have all."""


@dataclass(frozen=True)
class TensorAudit:
    """How a tensor of the file compares with the base's.

    n_rows, n_rows_read  rows that it has, and that were compared
    relative             norm of the error over the norm of the base's weights
    expected             the same of a sample of its rows as the plain encoder makes them; for types of floats
                         the type's limit
    cosine               of the angle between the file's weights and the base's
    scale                factor by which the base's weights come nearest to the file's
    is_plain             whether the sample has the bytes of the plain encoder
    n_bad_rows           rows that do not hold what they should
    n_nonfinite          weights that are NaN or infinite
    diagnoses            what is wrong
    """

    name: str
    type: str
    n_rows: int
    n_rows_read: int
    relative: float
    expected: float
    cosine: float
    scale: float
    is_plain: bool
    n_bad_rows: int
    n_nonfinite: int
    diagnoses: tuple[Diagnosis, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "type": self.type, "rows": self.n_rows, "rows_read": self.n_rows_read,
            "relative_error": self.relative, "expected_error": self.expected, "cosine": self.cosine,
            "scale": self.scale, "plain": self.is_plain, "bad_rows": self.n_bad_rows,
            "nonfinite": self.n_nonfinite, "wrong": [each.kind for each in self.diagnoses],
        }  # fmt: skip


class Measured(Protocol):
    """A divergence that was measured elsewhere."""

    def lines(self) -> list[str]:
        """Return it as text."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""


@dataclass(frozen=True)
class AuditReport:
    """An audit of a file.

    file, base  what was compared with what
    every_row   whether all rows of all tensors were compared, rather than runs of each matrix
    encoder     what it seems to have been encoded with
    tensors     those that both have, in the order of the file
    findings    the worst first
    evaluation  the file's divergence from the base on a text or a suite, where one was asked for
    """

    file: Path
    base: Path
    every_row: bool
    encoder: Encoder
    tensors: tuple[TensorAudit, ...]
    findings: tuple[Finding, ...]
    evaluation: Measured | None = None

    def __repr__(self) -> str:
        n_bad = len(self.at(Level.BAD))
        return f"<AuditReport of {self.file.name}: {len(self.tensors)} tensors, {n_bad} bad findings>"

    def _repr_html_(self) -> str:
        rows = [(str(each.level), each.where, each.text) for each in self.findings]
        return html_table(repr(self), ("level", "where", "finding"), rows)

    @property
    def is_wrong(self) -> bool:
        """Whether anything is wrong; warnings and notes are not."""
        return bool(self.at(Level.BAD))

    def at(self, level: Level) -> list[Finding]:
        """Return the findings of a level."""
        return [each for each in self.findings if each.level is level]

    def with_finding(self, finding: Finding) -> AuditReport:
        """Return the report with one more finding."""
        return replace(self, findings=tuple(sorted((*self.findings, finding), key=lambda each: -each.level)))

    def divergence_lines(self) -> list[str]:
        """Return the evaluation as text; nothing where none was asked for."""
        return [] if self.evaluation is None else self.evaluation.lines()

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "ok": not self.is_wrong,
            "file": str(self.file),
            "base": str(self.base),
            "every_row": self.every_row,
            "encoder": self.encoder,
            "findings": [
                {"level": str(each.level), "kind": each.kind, "about": list(each.about), "text": each.text}
                for each in self.findings
            ],
            "tensors": [each.to_json() for each in self.tensors],
            "evaluation": None if self.evaluation is None else self.evaluation.to_json(),
        }

    def to_html(self) -> str:
        """Return a page that loads nothing, as `gguf-tools audit --html` writes it."""
        return str(late("convert.audit.page").audit_page(self))  # which is made of this module's values

    def lines(self) -> Iterator[str]:
        """Yield the findings, a table of errors by type, and one line that sums up."""
        for each in capped(folded(self.findings), MOST_SHOWN):
            where = f"{where_text(each)}: " if each.about else ""
            yield f"{each.level}: {where}{each.text}"
        if self.tensors:
            yield from table(
                [_HEADS, *(_of_type(self.tensors, name) for name in _types(self.tensors))], right=(1, 2, 3, 4)
            )
        yield from self.divergence_lines()
        yield f"{printable(str(self.file))}: {self.summary()}"

    def summary(self) -> str:
        """Say how much was compared, and whether anything is wrong."""
        rows = "every row" if self.every_row else "runs of rows of every matrix"
        counts = ", ".join(
            f"{len(self.at(level))} {word}"
            for level, word in ((Level.BAD, "bad"), (Level.WARNING, "warnings"), (Level.NOTE, "notes"))
        )
        outcome = counts if self.findings else "nothing is wrong"
        return f"{len(self.tensors)} tensors compared with {printable(str(self.base))}, {rows}: {outcome}"


_HEADS = ("type", "tensors", "error", "encoder's", "worst", "tensor")


def _types(tensors: tuple[TensorAudit, ...]) -> list[str]:
    return list(dict.fromkeys(each.type for each in tensors))


def _of_type(tensors: tuple[TensorAudit, ...], name: str) -> tuple[str, ...]:
    """Return a row of the table: mean error, what the plain encoder makes, and the worst tensor."""
    here = [each for each in tensors if each.type == name]
    worst = max(here, key=lambda each: each.relative)
    mean = sum(each.relative for each in here) / len(here)
    expected = sum(each.expected for each in here) / len(here)
    return (
        name, str(len(here)), f"{100 * mean:.3g}%", f"{100 * expected:.3g}%", f"{100 * worst.relative:.3g}%",
        worst.name,
    )  # fmt: skip


def folded(findings: tuple[Finding, ...]) -> list[Finding]:
    """Join findings that say the same of several tensors, as those of several layers do."""
    groups: dict[tuple[str, str, Level], list[str]] = {}
    for each in findings:
        groups.setdefault((each.kind, each.text, each.level), []).extend(each.about[:1])
    return [Finding(kind, text, level, tuple(about)) for (kind, text, level), about in groups.items()]


def where_text(finding: Finding) -> str:
    """Name the tensors or keys of a finding; those of several layers together."""
    return ", ".join(cut_short(name, MAX_WHERE) for name in in_layer_ranges(finding.about))
