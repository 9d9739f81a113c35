"""What to collect, who is told how far it has come, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from forward.options import ForwardOptions
from forward.text.tokens import Cut
from gguf_tools.progress import NoReport, Reporter
from quantize.importances.entries import ImportanceFile

if TYPE_CHECKING:
    from forward.perplexity import Perplexity


@dataclass(frozen=True)
class CollectOptions:
    """What to collect, and how.

    cut             the part of the text that is used
    process_output  collect for output.weight, too
    perplexity      measure the model's perplexity on the text
    dataset         name of the text in the file; None: the name of the text's file
    forward         how the model is computed
    restart         start over instead of resuming an interrupted run
    earlier         importances to add to
    any_text        use the text even if it is nonsense; see forward/text/quality.py
    """

    cut: Cut = field(default_factory=Cut)
    process_output: bool = False
    perplexity: bool = True
    dataset: str | None = None
    forward: ForwardOptions = field(default_factory=ForwardOptions)
    restart: bool = False
    earlier: Sequence[ImportanceFile] = ()
    any_text: bool = False


@dataclass(frozen=True)
class Collected:
    """Importances, the perplexity if it was measured, and lines for the report."""

    importances: ImportanceFile
    perplexity: Perplexity | None
    notes: tuple[str, ...]


class CollectReporter(Reporter, Protocol):
    """Is told how far a collection has come."""

    def layer_done(self, layer: int, contents: Callable[[], ImportanceFile]) -> None:
        """A layer is done; `contents` returns the importances of all layers so far."""
        ...


class NoCollectReport(NoReport):
    """A CollectReporter that ignores everything."""

    def layer_done(self, layer: int, contents: Callable[[], ImportanceFile]) -> None:
        pass
