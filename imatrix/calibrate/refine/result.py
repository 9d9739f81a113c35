"""Result of a refinement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf_tools.spoken import spoken
from imatrix.evaluate.divergence import Estimate


@dataclass(frozen=True)
class Refinement:
    """Result of a refinement.

    path      of the file; of a split set, of the first part
    before    mean divergence on the chunks held back, before the first step
    after     the same, of what was written
    n_steps   steps that were made
    best      step whose scales were written; 0: those of the file as it was
    is_found  the file was there already, as asked, and nothing was measured
    """

    path: Path
    before: Estimate | None = None
    after: Estimate | None = None
    n_steps: int = 0
    best: int = 0
    seconds: float = 0.0
    is_found: bool = False

    def lines(self) -> Iterator[str]:
        """Tell what was done."""
        if self.is_found or self.before is None or self.after is None:
            yield spoken(f"{self.path}: is already there, as asked; --force makes it anew")
            return
        yield (
            f"divergence from the original on chunks held back: KLD {self.before.value:.5f} +/-"
            f" {self.before.error:.5f} before, {self.after.value:.5f} +/- {self.after.error:.5f} after"
            f" {self.best} of {self.n_steps} steps"
        )
        if not self.best:
            yield "note: no step was of use on chunks held back, so scales are as they were"
        yield f"wrote {self.path} in {self.seconds:.1f} s"
