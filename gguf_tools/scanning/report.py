"""A scan of a stranger's file as a function, and its result as a value, as lines and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_tools.argument_types import checked
from gguf_tools.files.named_files import AnyPath
from gguf_tools.findings import Finding, Level
from gguf_tools.format.shards import open_gguf
from gguf_tools.progress import Bar, Shown
from gguf_tools.scanning import as_json, as_text
from gguf_tools.scanning import scan as scan_open
from gguf_tools.text import counted


@dataclass(frozen=True)
class ScanReport:
    """Findings about a file that may not be trusted.

    path      as given
    findings  the worst first; of a kind at most ten at each level, and then how many more there are
    """

    path: Path
    findings: tuple[Finding, ...]

    def is_bad(self, *, strict: bool = False) -> bool:
        """Whether anything is bad; `strict`: warnings count as bad."""
        return any(each.level >= (Level.WARNING if strict else Level.BAD) for each in self.findings)

    def to_json(self, *, strict: bool = False) -> dict[str, Any]:
        """Return everything as plain data; `strict` as in `is_bad`."""
        return {"ok": not self.is_bad(strict=strict), "findings": [as_json(each) for each in self.findings]}

    def lines(self) -> list[str]:
        """Return the findings as text, and a line that sums up."""
        counts = Counter(finding.level for finding in self.findings)
        nouns = {Level.BAD: "bad finding", Level.WARNING: "warning", Level.NOTE: "note"}
        parts = [counted(counts[level], noun) for level, noun in nouns.items() if counts[level]]
        return [*map(as_text, self.findings), f"{self.path}: {', '.join(parts) or 'nothing suspicious'}"]


@checked
def scan(file: AnyPath, *, data: bool = False, progress: Shown = None) -> ScanReport:
    """Look for what is suspicious in a stranger's GGUF file, before it is loaded; any part opens a split set.

        if scan("model.gguf").is_bad(strict=True): ...

    data      read all tensors' data, too, as `verify` does
    progress  True, a function, or a bar of tqdm or rich, which moves with these data
    raises    GGUFError for a file that can't be opened at all, which is as bad as anything that is found
    """
    with open_gguf(file, may_lack_parts=True) as source, Bar("scanning", show=progress) as bar:
        return ScanReport(source.path, tuple(scan_open(source, data=data, progress=bar)))
