"""Verdict on a file that was made again: as a value, as lines for a terminal, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gguf_tools.findings import Finding
from gguf_tools.text import counted, in_layer_ranges, printable

Verdict = Literal["same", "consistent", "differs", "not made"]


@dataclass(frozen=True)
class TensorVerdict:
    """Result of making a tensor again.

    verdict    "same", "differs", "not made" where something is missing for it, or "consistent": calibrated
               bytes that differ as they do between processors, which proves nothing
    through    type of 16 bits that its source went through, or the grid that it kept; "" for neither
    n_rows     rows that were made
    n_blocks   blocks in them
    n_differ   blocks with other bytes
    kind, text what is wrong: a short name for programs, and in words; "" for the same bytes
    """

    name: str
    type: str
    verdict: Verdict
    through: str = ""
    n_rows: int = 0
    n_blocks: int = 0
    n_differ: int = 0
    kind: str = ""
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "type": self.type, "verdict": self.verdict, "through": self.through,
            "rows": self.n_rows, "blocks": self.n_blocks, "blocks_that_differ": self.n_differ,
            "kind": self.kind, "text": self.text,
        }  # fmt: skip


@dataclass(frozen=True)
class Rederivation:
    """A file that was made again.

    file, source  what was made of what
    file_type     words that give the types of its tensors, "" where there are none or they were not sought
    tensors       in the order of the file, up to the first that differs if that was asked for
    findings      about the header, and about tensors that only one of the two has
    sample        rows of each tensor that were made; None: all
    seed          decided which rows; None: all
    chances       largest chance that so many changed rows of one tensor slip through the sample, by their
                  number; empty: all rows were made
    n_left        tensors that were not looked at after the first that differs
    """

    file: Path
    source: Path
    file_type: str
    tensors: tuple[TensorVerdict, ...]
    findings: tuple[Finding, ...]
    sample: int | None
    seed: int | None
    chances: dict[int, float]
    n_left: int

    def __repr__(self) -> str:
        return f"<Rederivation of {self.file.name}: {self.summary()}>"

    @property
    def is_same(self) -> bool:
        """Whether every tensor has the bytes that the source gives, whatever the header says."""
        return not self.n_left and all(each.verdict == "same" for each in self.tensors)

    @property
    def is_as_claimed(self) -> bool:
        """Whether every tensor has the bytes that the source gives, and the header does not lie."""
        return self.is_same and not any(each.is_bad for each in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "same": self.is_same,
            "as_claimed": self.is_as_claimed,
            "file": str(self.file),
            "source": str(self.source),
            "file_type": self.file_type,
            "sample": self.sample,
            "seed": self.seed,
            "chance_to_slip_through": {str(rows): chance for rows, chance in self.chances.items()},
            "tensors_left": self.n_left,
            "findings": [
                {"level": str(each.level), "kind": each.kind, "about": list(each.about), "text": each.text}
                for each in self.findings
            ],
            "tensors": [each.to_json() for each in self.tensors],
        }

    def lines(self) -> Iterator[str]:
        """Yield the findings, each tensor that is not the same, and what the whole amounts to."""
        for finding in self.findings:
            where = f"{finding.where}: " if finding.about else ""
            yield f"{finding.level}: {where}{finding.text}"
        told: dict[tuple[Verdict, str], list[str]] = {}
        for each in self.tensors:
            if each.verdict != "same":
                told.setdefault((each.verdict, each.text), []).append(each.name)
        for (verdict, text), names in told.items():
            yield f"{verdict}: {', '.join(map(printable, in_layer_ranges(names)))}: {printable(text)}"
        if self.n_left:
            yield f"stopped at the first that differs; {counted(self.n_left, 'tensor')} not looked at"
        if self.seed is not None:
            yield f"{self.sample} rows of each tensor, chosen by --seed {self.seed}"
            yield "; ".join(
                f"a change of {counted(rows, 'row')} of one tensor slips through with a chance of up to"
                f" {100 * chance:.3g} %"
                for rows, chance in self.chances.items()
            )
        yield f"{printable(str(self.file))}: {self.summary()}"

    def summary(self) -> str:
        """Say in a sentence what was found."""
        counts = Counter(each.verdict for each in self.tensors)
        through = sorted({each.through for each in self.tensors if each.through})
        made = f"{len(self.tensors)} tensors made of {printable(str(self.source))}"
        made += f" as {self.file_type}" if self.file_type else ""
        made += f", through {' or '.join(through)}" if through else ""
        if self.is_same:
            rows = "every byte" if self.sample is None else "each sampled row"
            return f"same: {rows} of {made}{'' if self.is_as_claimed else '; but the header lies'}"
        parts = [f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict) if counts[verdict]]
        differs = counts["differs"] or counts["not made"]
        what = "not the same" if differs else "consistent, which is no proof"
        return f"{what}: of {made}: {', '.join(parts)}"
