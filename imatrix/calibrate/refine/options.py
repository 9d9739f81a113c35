"""Options of a refinement."""

from __future__ import annotations

from dataclasses import dataclass, field

from gguf_tools.argument_types import CheckedFields
from gguf_tools.number_types import Count, Minutes, Natural, Rate, Seed
from imatrix.forward.choices import CutChoices, ForwardChoices
from imatrix.forward.options import ForwardOptions
from imatrix.texts.tokens import Cut


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
