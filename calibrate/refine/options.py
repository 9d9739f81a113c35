"""Options of a refinement."""

from __future__ import annotations

from dataclasses import dataclass, field

from forward.choices import CutChoices, ForwardChoices
from forward.options import ForwardOptions
from forward.text.tokens import Cut
from gguf_tools.errors import BadArgument


@dataclass(frozen=True)
class RefineOptions:
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
    any_text  use the text even if it is nonsense; see forward/text/quality.py
    force     replace an output that is there
    raises    BadArgument for a number that makes no sense
    """

    cut: Cut = field(default_factory=Cut)
    minutes: float | None = None
    steps: int | None = None
    batch: int = 2
    passes: int = 0
    code_rate: float = 0.0008
    rate: float = 0.004
    seed: int = 0
    forward: ForwardOptions = field(default_factory=ForwardOptions)
    restart: bool = False
    any_text: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        for name in ("minutes", "steps", "batch", "rate", "code_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadArgument(f"{name} of {value}, expected a number above 0")
        if self.passes < 0:
            raise BadArgument(f"passes of {self.passes}, expected 0 or more")


class RefineChoices(CutChoices, ForwardChoices, total=False):
    """The fields of RefineOptions, and of the Cut and ForwardOptions in it, as keyword arguments."""

    cut: Cut
    minutes: float | None
    steps: int | None
    batch: int
    passes: int
    code_rate: float
    rate: float
    seed: int
    forward: ForwardOptions
    restart: bool
    any_text: bool
    force: bool
