"""Progress of long work: the callbacks it reports to, and the bar that shows it on standard error.

Work that copies or writes calls a `Progress` with the bytes of each piece. A bar counts bytes or steps (the
layers of a model); it appears on terminals only, so that logs and pipes stay clean.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

Progress = Callable[[int], object]
"""Callback of a piece of work: is given the number of bytes after each piece."""

StartProgress = Callable[[int], Progress]
"""Callback of a whole piece of work: is given its total of bytes, and returns what to call for each piece."""

PATIENCE_SECONDS = 1.5
"""Time to the first piece after which a bar explains the wait, if it can."""


def no_progress(n_bytes: int) -> None:
    """Ignore a piece of work."""


def no_start(total_bytes: int) -> Progress:
    """Ignore a whole piece of work."""
    return no_progress


@dataclass(frozen=True)
class Unit:
    """What a bar counts.

    name     as tqdm prints it
    scaled   whether large numbers are printed as 1.5M, in powers of 1024
    pattern  tqdm's `bar_format`, None for its own
    """

    name: str
    scaled: bool = False
    pattern: str | None = None


BYTES = Unit("B", scaled=True)

LAYERS = Unit("layer", pattern="{l_bar}{bar}| {n:.1f}/{total_fmt} [{elapsed}<{remaining}]{postfix}")
"""Layers of a model, with a decimal, because the chunks of a text advance a layer bit by bit."""


class Bar:
    """A progress bar with rate and time left on standard error; nothing where that is no terminal.

    label       printed before the bar
    unit        what is counted
    slow_start  printed once if nothing has advanced PATIENCE_SECONDS after the start

    `advance` may be called from any thread.

    with Bar("splitting") as bar:
        write_files(..., progress=bar.start)
    """

    def __init__(self, label: str, unit: Unit = BYTES, *, slow_start: str = "") -> None:
        self._label, self._unit, self._slow_start = label, unit, slow_start
        self._lock = threading.Lock()
        self._bar: Any = None
        self._notice: threading.Timer | None = None

    def start(self, total: int, done: int = 0) -> Callable[[float], object]:
        """Show the bar, unless there is nothing to count, and return `advance`.

        total  in units
        done   how many of them an earlier run has done
        """
        if total and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                desc=self._label,
                total=total,
                initial=done,
                unit=self._unit.name,
                unit_scale=self._unit.scaled,
                unit_divisor=1024 if self._unit.scaled else 1000,
                bar_format=self._unit.pattern,
                smoothing=0.1,
            )
            if self._slow_start:
                self._notice = threading.Timer(PATIENCE_SECONDS, self._explain)
                self._notice.daemon = True
                self._notice.start()
        return self.advance

    def advance(self, amount: float) -> None:
        """Count `amount` more units."""
        if self._bar is None:
            return
        self._cancel_notice()
        with self._lock:
            self._bar.update(amount)

    def remark(self, text: str) -> None:
        """Show `text` behind the bar."""
        if self._bar is not None:
            with self._lock:
                self._bar.set_postfix_str(text)

    def close(self) -> None:
        """Leave the bar as it is, and begin a new line after it."""
        self._cancel_notice()
        if self._bar is not None:
            with self._lock:
                self._bar.close()

    def _explain(self) -> None:
        with self._lock:
            self._bar.write(self._slow_start, file=sys.stderr)

    def _cancel_notice(self) -> None:
        if self._notice is not None:
            self._notice.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
