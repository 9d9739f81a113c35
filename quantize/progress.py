"""The progress bars of a run that writes an output: the kernels that it compiles first, then its bytes.

A calibration has a third one, for what comes before its first tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from gguf_tools.findings import teller
from gguf_tools.progress import LAYERS, Bar, Progress, Unit

if TYPE_CHECKING:
    from quantize.prepare import Preparation
    from quantize.run_options import RunOptions

KERNELS = Unit("kernel", pattern="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]", delay=1.0)
"""Kernels of a run: loading them from the cache takes less than a second, compiling them several."""


class ProgressBar:
    """Shows how many kernels are compiled, how far gradients have come, and how much is written; see `Bar`.

    with ProgressBar("quantizing") as bar:
        quantize(..., progress=bar.start, compiling=bar.compiling, gradients=bar.gradients)
    """

    def __init__(self, verb: str, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar = Bar(verb, quiet=quiet)
        self._kernels: Bar | None = None
        self._layers: Bar | None = None
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

    def gradients(self, n_layers: float, done: float) -> Callable[[float], object]:
        """Show the bar of a calibration's pass forward and back, and return what advances it."""
        self._layers = Bar("gradients of the text's predictions", LAYERS, quiet=self._quiet)
        return self._layers.start(n_layers, done)

    def shows(self, run: RunOptions) -> RunOptions:
        """Return how a run goes that these bars show; what a user should know goes to standard error, too."""
        shown = replace(run, progress=self.start, compiling=self.compiling, gradients=self.gradients)
        return replace(shown, tell=teller(quiet=self._quiet))

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

    def __exit__(self, *error: object) -> None:
        self._close_kernels()
        if self._layers is not None:
            self._layers.close()
        self._bar.close()
