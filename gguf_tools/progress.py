"""Progress of long work: the callbacks it reports to, and what shows it on standard error.

Work that copies or writes calls a `Progress` with the bytes of each piece. A bar counts bytes or steps (the
layers of a model). On a terminal it is a bar; elsewhere it is a line a minute, so that a log shows how far a
long run has come and a short one leaves no trace.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from gguf_tools.findings import Finding, teller

Progress = Callable[[int], object]
"""Callback of a piece of work: is given the number of bytes after each piece."""

StartProgress = Callable[[int], Progress]
"""Callback of a whole piece of work: is given its total of bytes, and returns what to call for each piece."""

StartSteps = Callable[[float, float], Callable[[float], object]]
"""Callback of work that counts steps: is given how many there are and how many are done, and returns what to
call for each further step, or with a share of one."""

LOG_SECONDS = 60.0
"""Time between two lines of a bar in a log."""


def no_progress(n_bytes: int) -> None:
    """Ignore a piece of work."""


def no_start(total_bytes: int) -> Progress:
    """Ignore a whole piece of work."""
    return no_progress


def no_steps(total: float, done: float) -> Callable[[float], object]:
    """Ignore work that counts steps."""
    return lambda steps: None


@dataclass(frozen=True)
class Unit:
    """What a bar counts.

    name     as tqdm prints it
    scaled   whether large numbers are printed as 1.5M, in powers of 1024
    pattern  tqdm's `bar_format`, None for its own
    delay    seconds that must pass before a bar is shown
    """

    name: str
    scaled: bool = False
    pattern: str | None = None
    delay: float = 0.0


BYTES = Unit("B", scaled=True)

LAYERS = Unit("layer", pattern="{l_bar}{bar}| {n:.1f}/{total_fmt} [{elapsed}<{remaining}]{postfix}")
"""Layers of a model, with a decimal, because the chunks of a text advance a layer bit by bit."""


class Bar:
    """A progress bar with rate and time left on standard error; a line a minute where that is no terminal.

    label  printed before the bar
    unit   what is counted
    quiet  show nothing at all

    `advance` may be called from any thread.

    with Bar("splitting") as bar:
        write_files(..., progress=bar.start)
    """

    def __init__(self, label: str, unit: Unit = BYTES, *, quiet: bool = False) -> None:
        self._label, self._unit, self._quiet = label, unit, quiet
        self._lock = threading.Lock()
        self._left = 0.0
        self._bar: Any = None
        self._log: _Log | None = None

    def start(self, total: float, done: float = 0) -> Callable[[float], object]:
        """Show the bar, unless there is nothing to count, and return `advance`.

        total  in units
        done   how many of them an earlier run has done
        """
        if not total or self._quiet:
            return self.advance
        self._left = total - done
        if not sys.stderr.isatty():
            self._log = _Log(self._label, total, done)
            return self.advance
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
            delay=self._unit.delay,
        )
        return self.advance

    def advance(self, amount: float) -> None:
        """Count `amount` more units; sums of fractions that come out above the total count as the total."""
        with self._lock:
            amount = min(amount, self._left)
            self._left -= amount
            if self._bar is not None:
                self._bar.update(amount)
            if self._log is not None:
                self._log.advance(amount)

    def remark(self, text: str) -> None:
        """Show `text` behind the bar, or in the lines of a log from now on."""
        with self._lock:
            if self._bar is not None:
                self._bar.set_postfix_str(text)
            if self._log is not None:
                self._log.remark = text

    def close(self) -> None:
        """Leave the bar as it is, and begin a new line after it."""
        if self._bar is not None:
            with self._lock:
                self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Reporter(Protocol):
    """Is told how far a run through the layers of models has come."""

    def tell(self, finding: Finding) -> None:
        """A user should know this before anything is computed."""
        ...

    def start(self, n_layers: int, done: int) -> None:
        """The run begins; `done` layers of `n_layers`, those of all models, are left from an earlier one."""
        ...

    def advance(self, layers: float) -> None:
        """This share of a layer, 0 to 1, has been computed since the last call."""
        ...

    def remark(self, text: str) -> None:
        """The work after the last layer has come as far as `text` says."""
        ...


class NoReport:
    """A Reporter that ignores everything."""

    def tell(self, finding: Finding) -> None:
        pass

    def start(self, n_layers: int, done: int) -> None:
        pass

    def advance(self, layers: float) -> None:
        pass

    def remark(self, text: str) -> None:
        pass


class LayerBar:
    """A Reporter that shows a bar over what `label` says, or nothing if `quiet`."""

    def __init__(self, label: str, *, quiet: bool = False) -> None:
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

    def remark(self, text: str) -> None:
        self._bar.remark(f" {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()


class _Log:
    """A bar as lines: how much is done, how long that took, and about how long the rest will take."""

    def __init__(self, label: str, total: float, done: float) -> None:
        self.remark = ""
        self._label, self._total, self._before, self._done = label, total, done, done
        self._began = self._told = time.monotonic()

    def advance(self, amount: float) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._told < LOG_SECONDS or self._done <= self._before:
            return
        self._told = now
        elapsed = now - self._began
        left = elapsed * (self._total - self._done) / (self._done - self._before)
        share = 100 * self._done / self._total
        line = f"{self._label}: {share:.0f} %, {_clock(elapsed)} gone, {_clock(left)} left{self.remark}"
        print(line, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    """Return a time as 0:07, 12:34 or 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
