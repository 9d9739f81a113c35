"""A progress bar for copies, in bytes, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

Progress = Callable[[int], object]
"""Called with the number of bytes after each piece of a copy."""

StartProgress = Callable[[int], Progress]
"""Called with the number of bytes of the whole copy; returns what is called as it goes on."""


def _say_nothing(n_bytes: int) -> None:
    pass


def no_progress(total_bytes: int) -> Progress:
    """Tell nobody."""
    return _say_nothing


class CopyBar:
    """Shows how much is copied; no bar where standard error is no terminal.

    with CopyBar("splitting") as bar:
        write_files(..., progress=bar.start)
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._bar: Any = None

    def start(self, total_bytes: int) -> Progress:
        """Show an empty bar, unless there is nothing to copy, and return what advances it."""
        if not total_bytes or not sys.stderr.isatty():
            return _say_nothing
        from tqdm import tqdm

        self._bar = tqdm(
            desc=self._verb, total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024, smoothing=0.1
        )
        advance: Progress = self._bar.update
        return advance

    def __enter__(self) -> CopyBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
