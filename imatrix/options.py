"""Options of a collection, and its result."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from convert.options import AdapterChoices, AdapterOptions
from gguf_tools.argument_types import CheckedFields
from imatrix.forward.options import CutChoices, ForwardChoices, ForwardOptions
from imatrix.texts.tokens import Cut
from quantize.importances import ImportanceSource
from quantize.importances.entries import ImportanceFile
from quantize.importances.files import importance_file

if TYPE_CHECKING:
    from imatrix.forward.logits import Perplexity


@dataclass(frozen=True)
class CollectOptions(AdapterOptions, CheckedFields):
    """Options of a collection, with those of an adapter for a folder.

    cut             the part of the text that is used
    process_output  collect for output.weight, too
    perplexity      measure the model's perplexity on the text
    dataset         name of the text in the file; None: the name of the text's file
    forward         how the model is computed
    restart         start over instead of resuming an interrupted run
    earlier         importances to add to: what `imatrix.load` returns, a path, or several of them
    any_text        use the text even if it is nonsense; see imatrix/texts/quality.py
    force           replace an output that is there
    """

    cut: Cut = field(default_factory=Cut)
    process_output: bool = False
    perplexity: bool = True
    dataset: str | None = None
    forward: ForwardOptions = field(default_factory=ForwardOptions)
    restart: bool = False
    earlier: ImportanceSource | Sequence[ImportanceSource] = ()
    any_text: bool = False
    force: bool = False

    @property
    def earlier_files(self) -> list[ImportanceFile]:
        """`earlier`, as files hold them; raises what `imatrix.load` raises."""
        if isinstance(self.earlier, ImportanceFile | Mapping | str | os.PathLike):
            return [importance_file(self.earlier)]
        return list(map(importance_file, self.earlier))


class CollectChoices(AdapterChoices, CutChoices, ForwardChoices, total=False):
    """The fields of CollectOptions, and of the Cut and ForwardOptions in it, as keyword arguments."""

    cut: Cut
    process_output: bool
    perplexity: bool
    dataset: str | None
    forward: ForwardOptions
    restart: bool
    earlier: ImportanceSource | Sequence[ImportanceSource]
    any_text: bool
    force: bool


@dataclass(frozen=True)
class Collected:
    """Result of a collection.

    importances  by tensor, with the texts and chunks that they are of
    perplexity   of the text under the model; None: not measured
    notes        lines for the report
    """

    importances: ImportanceFile
    perplexity: Perplexity | None
    notes: tuple[str, ...]


LayerDone = Callable[[int, Callable[[], ImportanceFile]], object]
"""Is called with the number of a layer that is done, and with what returns the importances of all so far."""

LABEL = "collecting importances"
"""Label of the bar of a collection."""

_STEPS_A_LINE, _MOST_STEPS = 6, 24
"""Running perplexities: how many stand in a line, and how many of a long text are shown, evenly spread."""


def perplexity_lines(perplexity: Perplexity) -> list[str]:
    """Return the perplexity as it ran, at 24 chunks or fewer of a long text, and in the end."""
    values = perplexity.by_chunk
    every = -(-len(values) // _MOST_STEPS) or 1
    shown = [number for number in range(1, len(values) + 1) if number % every == 0 or number == len(values)]
    steps = [f"[{number}] {values[number - 1]:.4f}" for number in shown]
    lines = [", ".join(steps[start : start + _STEPS_A_LINE]) for start in range(0, len(steps), _STEPS_A_LINE)]
    return [*lines, f"perplexity {perplexity.value:.4f} +/- {perplexity.error:.5f}"]
