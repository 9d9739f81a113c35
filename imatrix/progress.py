"""How far a collection has come, for people: a bar over layers, and the running perplexity."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from imatrix.perplexity import Perplexity
    from quantize.importance import ImportanceFile


class LayerBar:
    """A Reporter with a bar, rate and time left on standard error; no bar where that is no terminal.

    every  layers between two calls of `save`; 0 for none
    save   called with what is known so far
    """

    def __init__(self, every: int, save: Callable[[ImportanceFile], None]) -> None:
        self._every, self._save = every, save
        self._bar: Any = None

    def start(self, n_layers: int, done: int) -> None:
        from tqdm import tqdm

        if done:
            print(f"going on after {done} of {n_layers} layers", file=sys.stderr)
        self._bar = tqdm(
            desc="layers",
            total=n_layers,
            initial=done,
            unit="layer",
            bar_format="{l_bar}{bar}| {n:.1f}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
            smoothing=0.1,
            disable=not sys.stderr.isatty(),
        )

    def advance(self, layers: float) -> None:
        self._bar.update(layers)

    def layer_done(self, layer: int, seen: Callable[[], ImportanceFile]) -> None:
        if self._every and (layer + 1) % self._every == 0:
            self._save(seen())

    def perplexity(self, found: Perplexity) -> None:
        if sys.stderr.isatty():
            self._bar.set_postfix_str(f" perplexity {found.value:.4f} +/- {found.error:.4f}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
