"""Progress of long work: what it reports to, and where that is shown.

Functions that take long have a `progress`, which is one of

    None, False    nothing is shown
    True           a bar on standard error: on a terminal a line that changes, elsewhere a line a minute, so
                   that a log shows how far a long run has come and a short one leaves no trace
    a function     is called with a `ProgressState` after every piece of work, from the thread that did it.
                   An exception from there ends the work like ctrl-C: what is finished stays for the next run
    a tqdm bar     is given totals and descriptions, and moved; a class, such as tqdm.notebook.tqdm, makes one
    a rich bar     a `rich.progress.Progress`: gets a task for each part of the work
    a CancelToken  shows what it was made with, and ends the work once another thread has called `cancel`

Below that, work tells a `Reporter` how much there is, how much it has done, and what it is at. `Bar` is one
that brings this to what `progress` names.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

from gguf_tools.errors import BadArgument, Cancelled
from gguf_tools.findings import Finding, teller
from gguf_tools.text import has_terminal, printable, say_aside

Advance = Callable[[float], object]
"""Is called after each piece of work, from the thread that did it, with how much it was."""


@runtime_checkable
class Reporter(Protocol):
    """Is told how far work has come: in bytes, layers, kernels, or seconds that it would take one thread."""

    def start(self, work: float, done: float) -> object:
        """Begin `work`, of which an earlier run has done some; what comes beside layers counts in layers."""
        return None

    def advance(self, amount: float) -> None:
        """Count `amount` more as done; any thread may call it."""
        return

    def remark(self, text: str) -> None:
        """Say what the work is at."""
        return

    def tell(self, finding: Finding) -> None:
        """Say what a user should know before anything is computed."""
        return


class NoReport(Reporter):
    """A Reporter that ignores everything."""


NO_REPORT = NoReport()

LOG_SECONDS = 60.0
"""Time between two lines of a bar in a log."""

_NARROW = 80
"""Columns of a terminal below which a bar leaves out all but its share and the time left."""

_BESIDE_LABEL = 30
"""Columns that share, times and a short bar need beside the label."""


@dataclass(frozen=True)
class ProgressState:
    """How far a piece of work has come.

    label   what is being done: "quantizing to Q4_K_M"
    done    how much of it is done, what an earlier run has left included
    total   how much there is to do
    unit    what both count: "B" for bytes, "kernel", or "work" where only their ratio means something
    remark  what else there is to say, or ""
    """

    label: str
    done: float
    total: float
    unit: str
    remark: str = ""

    @property
    def share(self) -> float:
        """The part that is done, 0 to 1."""
        return self.done / self.total if self.total else 1.0


class TqdmBar(Protocol):
    """A bar of tqdm, or of anything that moves alike."""

    total: Any

    def update(self, n: float) -> object: ...


class RichBars(Protocol):
    """A `rich.progress.Progress`, or anything that has tasks alike."""

    def add_task(self, description: str, *, total: float, completed: int) -> Any: ...

    def update(self, task_id: Any, *, completed: float) -> object: ...


class CancelToken:
    """A `progress` by which another thread ends the work: `cancel` may be called from any.

        token = CancelToken()
        threading.Timer(60, token.cancel).start()
        quantize("lite-bf16.gguf", "lite-Q4_K_M.gguf", "Q4_K_M", progress=token)    # raises Cancelled

    The work ends with Cancelled after the piece that is being done: rows of a tensor, a part of a layer. What
    is finished stays, and the same call goes on from there. A token that is cancelled stays so.

    show  what shows the progress: True, a function, or a bar of tqdm or rich; None: nothing
    """

    def __init__(self, show: _Shown = None) -> None:
        self.show = show
        self._event = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` has been called."""
        return self._event.is_set()

    def cancel(self) -> None:
        """End the work that has this token, and all that will get it."""
        self._event.set()

    def check(self) -> None:
        """Raise Cancelled if `cancel` has been called."""
        if self.is_cancelled:
            raise Cancelled("cancelled; finished work is kept, and the same call resumes from there")


_Shown = bool | Callable[[ProgressState], object] | TqdmBar | RichBars | None

Shown = _Shown | CancelToken
"""Values that `progress` may have: see above."""


@dataclass(frozen=True)
class Unit:
    """Unit in which a bar counts.

    name     as tqdm prints it
    scaled   whether large numbers are printed as 1.5M, in powers of 1024
    pattern  tqdm's `bar_format`, None for its own
    delay    seconds that must pass before a bar is shown
    average  whether the time left follows from the whole run's speed, rather than from the latest
    """

    name: str
    scaled: bool = False
    pattern: str | None = None
    delay: float = 0.0
    average: bool = False


BYTES = Unit("B", scaled=True)

KERNELS = Unit("kernel", pattern="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]", delay=1.0)
"""Kernels of a run: loading them from the cache takes less than a second, compiling them several."""

WORK = Unit("work", pattern="{l_bar}{bar}| {elapsed}<{remaining}{postfix}", average=True)
"""Work of several kinds, weighed by how long each takes: only shares and times mean something."""


class Bar:
    """A Reporter that brings how far a piece of work has come to what `show` names.

    label  what is being done
    unit   what is counted
    show   see above

    A block that ends without an error leaves the bar full. Findings are printed where `show` is True.

    with Bar("splitting") as bar:
        write_files(..., progress=bar)
    """

    def __init__(self, label: str, unit: Unit = BYTES, show: Shown = True) -> None:
        self._token = show if isinstance(show, CancelToken) else None
        self._show = show.show if isinstance(show, CancelToken) else show
        self._label, self._unit = printable(label), unit
        self._lock = threading.Lock()
        self._left = 0.0
        self._state = ProgressState(self._label, 0.0, 0.0, unit.name)
        self._tell: _Tell | None = None
        self._opened = ExitStack()

    def start(self, total: float, done: float = 0) -> Advance:
        """Show the bar, unless there is nothing to count, and return `advance`.

        Work of several parts may start it again: then the bar before ends as it is.
        total  in units
        done   how many of them an earlier run has done
        """
        self.close()
        if total:
            self._left = max(0.0, total - done)
            state = ProgressState(self._label, done, total, self._unit.name)
            self._tell = _tell_of(self._show, state, self._unit, self._opened)
            self._told(state)
        return self.advance

    def advance(self, amount: float) -> None:
        """Count `amount` more units; sums of fractions that come out above the total count as the total."""
        with self._lock:
            amount = min(amount, self._left)
            self._left -= amount
            self._told(replace(self._state, done=self._state.done + amount))

    def remark(self, text: str) -> None:
        """Show `text` beside the bar from now on."""
        with self._lock:
            self._told(replace(self._state, remark=printable(text)))

    def tell(self, finding: Finding) -> None:
        teller(quiet=self._show is not True)(finding)

    def _told(self, state: ProgressState) -> None:
        self._state = state
        if self._token is not None:
            self._token.check()
        if self._tell is not None:
            self._tell(state)

    def say(self, text: str) -> None:
        """Show `text` beside the bar, and where that is a log, in a line of it."""
        if self._show is True and not has_terminal():
            say_aside(text)
        else:
            self.remark(text)

    def close(self) -> None:
        """Leave the bar as it is, and begin a new line after it."""
        with self._lock:
            self._tell = None
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._token = None  # all that is left to do is to say so
        if kind is None and self._left:
            self.advance(self._left)
        self.close()


_Tell = Callable[[ProgressState], object]


def _tell_of(show: _Shown, state: ProgressState, unit: Unit, opened: ExitStack) -> _Tell | None:
    """Find out what `progress` names, and return what shows states there; None: nothing does.

    opened  closes what was made for this
    raises  BadArgument for what `progress` can't be
    """
    if show is None or show is False:
        return None
    if show is True:
        if not has_terminal():
            return _Log(state).tell
        from tqdm import tqdm

        show = tqdm
    if hasattr(show, "add_task"):
        return _tell_rich(show, state)
    if hasattr(show, "update"):
        if isinstance(show, type):
            return _Tqdm(opened.enter_context(closing(show(**_tqdm_options(state, unit)))), state).tell
        _begin_anew(show, state)
        return _Tqdm(show, state).tell
    if callable(show):
        return show
    raise BadArgument(f"progress={show!r}: expected True, a function, or a bar of tqdm or rich")


def _begin_anew(bar: Any, state: ProgressState) -> None:
    """Bring a bar of tqdm that the caller has to the beginning of a piece of work."""
    if hasattr(bar, "reset"):
        bar.reset(total=state.total)
    bar.total = state.total
    if hasattr(bar, "set_description"):
        bar.set_description(state.label)
    bar.update(state.done)


class _Tqdm:
    """A bar of tqdm, at the state that it shows."""

    def __init__(self, bar: Any, state: ProgressState) -> None:
        self._bar, self._shown = bar, state

    def tell(self, state: ProgressState) -> None:
        # Sums of fractions come out a little above the total, which tqdm would complain of.
        left = self._bar.total - getattr(self._bar, "n", 0)
        self._bar.update(min(state.done - self._shown.done, left))
        if state.remark != self._shown.remark and hasattr(self._bar, "set_postfix_str"):
            self._bar.set_postfix_str(state.remark)
        self._shown = state


def _tqdm_options(state: ProgressState, unit: Unit) -> dict[str, Any]:
    """Describe a bar to tqdm; on a narrow terminal the label is cut, so that the time left stays."""
    n_columns = shutil.get_terminal_size().columns
    label, pattern = state.label, unit.pattern
    if n_columns < _NARROW:
        pattern = "{l_bar}{bar}| {elapsed}<{remaining}"
    room = max(8, n_columns - _BESIDE_LABEL)
    if len(label) > room:
        label = f"{label[: room - 3]}..."
    return {
        "desc": label,
        "total": state.total,
        "initial": state.done,
        "unit": unit.name,
        "unit_scale": unit.scaled,
        "unit_divisor": 1024 if unit.scaled else 1000,
        "bar_format": pattern,
        "smoothing": 0 if unit.average else 0.1,
        "delay": unit.delay,
    }


def _tell_rich(bars: Any, first: ProgressState) -> _Tell:
    """Make a task of the caller's rich bars, which stays there, and return the function that moves it."""
    task = bars.add_task(first.label, total=first.total, completed=first.done)

    def tell(state: ProgressState) -> None:
        bars.update(task, completed=state.done)
        if state.remark:
            bars.update(task, description=f"{state.label} {state.remark}")

    return tell


class _Log:
    """A bar as lines: how much is done, how long that took, and about how long the rest will take."""

    def __init__(self, state: ProgressState) -> None:
        self._before = state.done
        self._began = self._told = time.monotonic()

    def tell(self, state: ProgressState) -> None:
        now = time.monotonic()
        if now - self._told < LOG_SECONDS or state.done <= self._before:
            return
        self._told = now
        elapsed = now - self._began
        left = elapsed * (state.total - state.done) / (state.done - self._before)
        remark = f" ({state.remark})" if state.remark else ""
        times = f"{clock_text(elapsed)} elapsed, {clock_text(left)} left{remark}"
        say_aside(f"{state.label}: {100 * state.share:.0f} %, {times}")


@contextmanager
def part_of(bar: Reporter, amount: float) -> Iterator[Callable[[ProgressState], None]]:
    """Give the `progress` of a piece that makes up `amount` of a bar's work; afterwards all of it is done."""
    moved = 0.0

    def move(state: ProgressState) -> None:
        nonlocal moved
        if state.unit != KERNELS.name:
            further = max(0.0, amount * state.share - moved)
            moved += further
            bar.advance(further)

    yield move
    bar.advance(amount - moved)


class _LayerBar(Bar):
    """A bar of work that counts in layers, and says where it resumes."""

    def __init__(self, label: str, show: Shown = True) -> None:
        super().__init__(label, WORK, show)

    def start(self, total: float, done: float = 0) -> Advance:
        if done and self._show is True:
            say_aside(f"resuming after {100 * done / total:.0f} % of the work")
        return super().start(total, done)


@contextmanager
def reporting(show: Shown | Reporter, label: str) -> Iterator[Reporter]:
    """Give what tells `show` how far a run through layers has come; a Reporter is told itself."""
    if isinstance(show, Reporter):
        yield show
        return
    with _LayerBar(label, show) as bar:
        yield bar


def clock_text(seconds: float) -> str:
    """Write a time as 0:07, 12:34 or 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
