"""How far a collection has come, for people: a bar over layers, and the running perplexity."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gguf_tools.findings import Finding, teller
from gguf_tools.progress import LAYERS, Bar

if TYPE_CHECKING:
    from forward.perplexity import Perplexity
    from quantize.importance import ImportanceFile


_STEPS_A_LINE, _MOST_STEPS = 6, 24
"""Running perplexities: how many stand in a line, and how many of a long text are shown, evenly spread."""


class LayerBar:
    """A Reporter that shows a bar over layers, and saves what is known after every few of them.

    every  layers between two calls of `save`; 0 for none
    save   called with what is known so far
    quiet  show nothing
    """

    def __init__(self, every: int, save: Callable[[ImportanceFile], None], *, quiet: bool = False) -> None:
        self._every, self._save, self._quiet = every, save, quiet
        self._bar = Bar("layers", LAYERS, quiet=quiet)

    def tell(self, finding: Finding) -> None:
        teller(quiet=self._quiet)(finding)

    def start(self, n_layers: int, done: int) -> None:
        if done and not self._quiet:
            print(f"resuming after {done} of {n_layers} layers", file=sys.stderr)
        self._bar.start(n_layers, done)

    def advance(self, layers: float) -> None:
        self._bar.advance(layers)

    def layer_done(self, layer: int, contents: Callable[[], ImportanceFile]) -> None:
        if self._every and (layer + 1) % self._every == 0:
            self._save(contents())

    def perplexity(self, running: Perplexity) -> None:
        self._bar.remark(f" perplexity {running.value:.4f} +/- {running.error:.4f}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


def perplexity_lines(perplexity: Perplexity) -> list[str]:
    """Return the perplexity as it ran, at 24 chunks or fewer of a long text, and in the end."""
    values = perplexity.by_chunk
    every = -(-len(values) // _MOST_STEPS) or 1
    shown = [number for number in range(1, len(values) + 1) if number % every == 0 or number == len(values)]
    steps = [f"[{number}] {values[number - 1]:.4f}" for number in shown]
    lines = [", ".join(steps[start : start + _STEPS_A_LINE]) for start in range(0, len(steps), _STEPS_A_LINE)]
    return [*lines, f"perplexity {perplexity.value:.4f} +/- {perplexity.error:.5f}"]
