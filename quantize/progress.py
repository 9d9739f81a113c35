"""The progress bar of a run that writes an output: the kernels that it compiles first, then its bytes."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING

from gguf_tools.progress import Bar, Progress, Unit

if TYPE_CHECKING:
    from quantize.prepare import Preparation

KERNELS = Unit("kernel", pattern="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]", delay=1.0)
"""Kernels of a run: loading them from the cache takes less than a second, compiling them several."""


class ProgressBar:
    """Shows how many kernels are compiled, and then how much of the output is written; see `Bar`.

    with ProgressBar("quantizing") as bar:
        quantize(..., progress=bar.start, compiling=bar.compiling)
    """

    def __init__(self, verb: str, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar = Bar(verb, quiet=quiet)
        self._kernels: Bar | None = None
        self._lock = threading.Lock()
        self._total = 0

    def start(self, preparation: Preparation) -> Progress:
        """Get ready for what was decided, and return what shows and advances the bar, from any thread.

        Of several outputs that are made together, the bar shows the sum.
        """
        self._total += preparation.plan.total_bytes
        return self._advance

    def compiling(self, n_kernels: int) -> Progress:
        """Show the bar of kernels if they take long, and return what advances it, from any thread."""
        self._kernels = Bar(f"compiling {n_kernels} kernels, once", KERNELS, quiet=self._quiet)
        return self._kernels.start(n_kernels)

    def _advance(self, n_bytes: int) -> None:
        with self._lock:
            total, self._total = self._total, 0
            if total:
                self._close_kernels()
                self._bar.start(total)
        self._bar.advance(n_bytes)

    def _close_kernels(self) -> None:
        if self._kernels is not None:
            self._kernels.close()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_kernels()
        self._bar.close()
