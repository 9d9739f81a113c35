"""How far an evaluation, or another run through layers, has come, as a bar."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from gguf_tools.findings import Finding, teller
from gguf_tools.progress import LAYERS, Bar


class EvaluationBar:
    """A Reporter that shows a bar over what `label` says, or nothing if `quiet`."""

    def __init__(self, label: str = "layers of all models", *, quiet: bool = False) -> None:
        self._label, self._quiet = label, quiet
        self._bar = Bar(label, LAYERS, quiet=quiet)

    def tell(self, finding: Finding) -> None:
        teller(quiet=self._quiet)(finding)

    def start(self, n_layers: int, done: int) -> None:
        if done and not self._quiet:
            print(f"resuming after {done} of {n_layers} {self._label}", file=sys.stderr)
        self._bar.start(n_layers, done)

    def advance(self, layers: float) -> None:
        self._bar.advance(layers)

    def comparing(self, chunk: int, n_chunks: int) -> None:
        self._bar.remark(f" comparing logits, chunk {chunk} of {n_chunks}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
