"""The progress bar of a run that writes an output: its bytes, and a word on kernels when it starts slowly."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from gguf_tools.progress import Bar, Progress

if TYPE_CHECKING:
    from quantize.prepare import Preparation

COMPILING = "compiling kernels, once for each type; later runs find them in the cache"
"""Reason for a slow start: a chunk takes a fraction of a second, unless its kernels are compiled first."""


class ProgressBar:
    """Shows how much of the output is written; see `Bar` for where and how.

    with ProgressBar("quantizing") as bar:
        quantize(..., progress=bar.start)
    """

    def __init__(self, verb: str, *, quiet: bool = False) -> None:
        self._bar = Bar(verb, slow_start=COMPILING, quiet=quiet)

    def start(self, preparation: Preparation) -> Progress:
        """Show an empty bar for what was decided, and return what advances it, from any thread."""
        return self._bar.start(preparation.plan.total_bytes)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
