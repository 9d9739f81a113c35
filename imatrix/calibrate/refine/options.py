"""Options of a refinement, and its result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.argument_types import CheckedFields, Count, Minutes, Natural, Rate, Seed
from gguf_tools.choices import spoken
from imatrix.forward.options import CutChoices, ForwardChoices, ForwardOptions
from imatrix.texts.tokens import Cut

if TYPE_CHECKING:
    from imatrix.evaluate.divergence import Estimate


@dataclass(frozen=True)
class RefineOptions(CheckedFields):
    """Options of a refinement.

    cut       the part of the text that is used
    minutes   about how long the steps may take; None: once through the text
    steps     number of steps, in place of minutes
    batch     chunks of a step
    passes    how often codes go through the text, layer by layer, before scales move; 0: they stay
    code_rate  the first that is tried of how far codes move in a step, in units of the distance between two
    rate      about the relative change of a scale in a step, at 2.5 bits per weight and at first; it falls
              to zero along half a cosine
    seed      decides the order of the chunks
    forward   how both models are computed
    restart   start over instead of resuming
    any_text  use the text even if it is nonsense; see imatrix/texts/quality.py
    force     replace an output that is there
    raises    BadArgument for a number that makes no sense
    """

    cut: Cut = field(default_factory=Cut)
    minutes: Minutes | None = None
    steps: Count | None = None
    batch: Count = 2
    passes: Natural = 0
    code_rate: Rate = 0.0008
    rate: Rate = 0.004
    seed: Seed = 0
    forward: ForwardOptions = field(default_factory=ForwardOptions)
    restart: bool = False
    any_text: bool = False
    force: bool = False


class RefineChoices(CutChoices, ForwardChoices, total=False):
    """The fields of RefineOptions, and of the Cut and ForwardOptions in it, as keyword arguments."""

    cut: Cut
    minutes: Minutes | None
    steps: Count | None
    batch: Count
    passes: Natural
    code_rate: Rate
    rate: Rate
    seed: Seed
    forward: ForwardOptions
    restart: bool
    any_text: bool
    force: bool


@dataclass(frozen=True)
class Refinement:
    """Result of a refinement.

    path      of the file; of a split set, of the first part
    before    mean divergence on the chunks held back, before the first step
    after     the same, of what was written
    n_steps   steps that were made
    best      step whose scales were written; 0: those of the file as it was
    seconds   how long it took
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
            yield spoken(f"{self.path}: exists already, and is what you asked for; --force makes it anew")
            return
        yield (
            f"divergence from the original on chunks held back: KLD {self.before.value:.5f} +/-"
            f" {self.before.error:.5f} before, {self.after.value:.5f} +/- {self.after.error:.5f} after"
            f" {self.best} of {self.n_steps} steps"
        )
        if not self.best:
            yield "note: no step improved the chunks held back, so the scales are unchanged"
        yield f"wrote {self.path} in {self.seconds:.1f} s"
