"""Work that the runs of several types of one model share: it depends on the original and the text alone.

Gradients are collected once, beside the first output. Where the hidden states of all runs fit into memory,
the runs go from layer to layer in step, and the original's pass is theirs in common. So each run's bytes are
those of a run alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Self, TypeVar

from gguf_tools.findings import Finding
from gguf_tools.progress import Reporter

_Value = TypeVar("_Value")


class SharedWork:
    """The runs of several types.

    paths  of their first outputs; work folders that are shared stand beside the first of them
    """

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self._n_inside, self._opened = 0, ExitStack()
        self._made: dict[type, object] = {}
        self._bar: _JointBar | None = None

    def join(self, path: Path) -> None:
        """Count a run in."""
        if path not in self.paths:
            self.paths.append(path)

    def __enter__(self) -> Self:
        self._n_inside += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._n_inside -= 1
        if not self._n_inside:
            self._made.clear()
            self._bar = None
            self._opened.close()

    def bar(self, bar: Reporter, work: float) -> Reporter:
        """Return the bar of all runs, given that of one of them and its work."""
        if self._bar is None:
            self._bar = _JointBar(bar)
        self._bar.work += work
        return self._bar

    def once(self, kind: type[_Value], make: Callable[[], _Value]) -> _Value:
        """Return a value that the first run makes, and the last to leave drops."""
        if kind not in self._made:
            self._made[kind] = make()
        value = self._made[kind]
        assert isinstance(value, kind)
        return value

    def opened_once(self, kind: type[_Value], make: Callable[[], AbstractContextManager[_Value]]) -> _Value:
        """Return a value that the first run opens, and the last to leave closes."""
        return self.once(kind, lambda: self._opened.enter_context(make()))


class _JointBar(Reporter):
    """A bar of several runs; all have told their work before the first begins."""

    def __init__(self, bar: Reporter) -> None:
        self._bar, self.work, self._is_shown = bar, 0.0, False

    def start(self, work: float, done: float) -> None:
        if self._is_shown:
            self._bar.advance(done)
        else:
            self._is_shown = True
            self._bar.start(self.work, done)

    def advance(self, amount: float) -> None:
        self._bar.advance(amount)

    def remark(self, text: str) -> None:
        self._bar.remark(text)

    def tell(self, finding: Finding) -> None:
        self._bar.tell(finding)
