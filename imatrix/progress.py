"""How far a collection has come, for people: a bar over layers, and the running perplexity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gguf_tools.progress import LayerBar

if TYPE_CHECKING:
    from forward.perplexity import Perplexity
    from quantize.importances.entries import ImportanceFile


_STEPS_A_LINE, _MOST_STEPS = 6, 24
"""Running perplexities: how many stand in a line, and how many of a long text are shown, evenly spread."""


class CollectBar(LayerBar):
    """A CollectReporter that shows a bar over layers, and saves what is known after every few of them.

    every  layers between two calls of `save`; 0 for none
    save   called with what is known so far
    quiet  show nothing
    """

    def __init__(self, every: int, save: Callable[[ImportanceFile], None], *, quiet: bool = False) -> None:
        super().__init__("layers", quiet=quiet)
        self._every, self._save = every, save

    def layer_done(self, layer: int, contents: Callable[[], ImportanceFile]) -> None:
        if self._every and (layer + 1) % self._every == 0:
            self._save(contents())


def perplexity_lines(perplexity: Perplexity) -> list[str]:
    """Return the perplexity as it ran, at 24 chunks or fewer of a long text, and in the end."""
    values = perplexity.by_chunk
    every = -(-len(values) // _MOST_STEPS) or 1
    shown = [number for number in range(1, len(values) + 1) if number % every == 0 or number == len(values)]
    steps = [f"[{number}] {values[number - 1]:.4f}" for number in shown]
    lines = [", ".join(steps[start : start + _STEPS_A_LINE]) for start in range(0, len(steps), _STEPS_A_LINE)]
    return [*lines, f"perplexity {perplexity.value:.4f} +/- {perplexity.error:.5f}"]
