"""A progress bar in bytes, with rate and time left, on standard error."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any

from quantize.fill.filling import Progress
from quantize.pipeline import Preparation

# A chunk takes a fraction of a second; when the first one takes longer, kernels are being compiled.
_PATIENCE_SECONDS = 1.5


class ProgressBar:
    """Shows how much of the output is written; no bar where standard error is no terminal.

    with ProgressBar("quantizing") as bar:
        quantize(..., progress=bar.start)
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._lock = threading.Lock()
        self._bar: Any = None
        self._notice = threading.Timer(_PATIENCE_SECONDS, self._say_compiling)
        self._notice.daemon = True

    def start(self, preparation: Preparation) -> Progress:
        """Show an empty bar for what was decided, and return what advances it, from any thread."""
        from tqdm import tqdm

        self._bar = tqdm(
            desc=self._verb,
            total=preparation.plan.total_bytes,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            smoothing=0.1,
            disable=not sys.stderr.isatty(),
        )
        self._notice.start()
        return self._advance

    def _advance(self, n_bytes: int) -> None:
        self._notice.cancel()
        with self._lock:
            self._bar.update(n_bytes)

    def _say_compiling(self) -> None:
        with self._lock:
            self._bar.write(
                "compiling kernels, once for each type; later runs find them in the cache", file=sys.stderr
            )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._notice.cancel()
        if self._bar is not None:
            self._bar.close()
