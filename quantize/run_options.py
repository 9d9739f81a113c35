"""How a run goes, whatever it makes: threads, resuming, reuse, verifying, progress; shared by all fronts.

A front takes its options as values, or their fields as keyword arguments: `with_choices` makes one of both.

On a terminal, a run shows the kernels that it compiles first, then one bar for all the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

from gguf_tools.cluster.address import Address
from gguf_tools.files.named_files import Paths
from gguf_tools.findings import Finding, Tell, teller
from gguf_tools.format.values import Value
from gguf_tools.number_types import Threads
from gguf_tools.progress import BYTES, KERNELS, WORK, Bar, Progress, Shown, StartMoving, StartProgress
from quantize.fill.options import FillOptions
from quantize.options import FileChoices

if TYPE_CHECKING:
    from quantize.prepare import Preparation


@dataclass(frozen=True)
class RunOptions(FillOptions):
    """How to run; nothing here changes a byte of the output.

    n_threads, restart, reuse, verify, scheduler, tell  see FillOptions; `progress` sees to `compiling` and
               `calibrating`
    force      replace outputs that are there, and make anew those that are as asked already
    replace    replace outputs that are there and are not as asked, as llama-quantize does
    progress   True, a function, or a bar of tqdm or rich; see gguf_tools/progress.py
    label      what it says
    """

    progress: Shown = None
    force: bool = field(default=False, kw_only=True)
    replace: bool = field(default=False, kw_only=True)
    label: str = field(default="writing", kw_only=True)


class RunChoices(TypedDict, total=False):
    """The fields of RunOptions as keyword arguments."""

    n_threads: Threads | None
    restart: bool
    force: bool
    replace: bool
    reuse: Paths
    verify: bool
    scheduler: Address | None
    compiling: StartProgress
    calibrating: StartMoving
    tell: Tell
    progress: Shown
    label: str


class QuantizeChoices(FileChoices, RunChoices, total=False):
    """The fields of QuantizeOptions and RunOptions as keyword arguments."""

    keep_split: bool
    kv_overrides: Iterable[tuple[str, Value]]


class RunBar:
    """Shows how far a run has come: in bytes, or where a calibration makes them in seconds of its work.

    A terminal shows the kernels that are compiled before, too.
    """

    def __init__(self, label: str, show: Shown, *, is_calibrated: bool = False) -> None:
        self._show, self._is_calibrated = show, is_calibrated
        self._bar = Bar(label, WORK if is_calibrated else BYTES, show)
        self._kernels = Bar("", show=None)
        self._lock = threading.Lock()
        self._total = 0

    def start(self, preparation: Preparation) -> Progress:
        """Get ready for what was decided, and return what shows and advances the bar, from any thread.

        Of several outputs that are made together, the bar shows the sum.
        """
        self._total += preparation.plan.total_bytes
        return self._advance

    def told(self, run: RunOptions) -> RunOptions:
        """Let a run move these bars, and with True tell what a user should know."""
        told = teller(quiet=False) if self._show is True else run.tell

        def tell(finding: Finding) -> None:
            self._bar.close()
            told(finding)

        return replace(run, compiling=self._compiling, calibrating=self._calibrating, tell=tell)

    def _compiling(self, n_kernels: int) -> Progress:
        """Show the bar of kernels if they take long, and return what advances it, from any thread."""
        show = True if self._show is True else None
        self._kernels = Bar(f"compiling {n_kernels} kernels, once", KERNELS, show)
        return self._kernels.start(n_kernels)

    def _calibrating(self, seconds: float, done: float) -> Bar:
        """Show the work of a calibration, and return its bar."""
        self._kernels.close()
        self._bar.start(seconds, done)
        return self._bar

    def _advance(self, n_bytes: int) -> None:
        if self._is_calibrated:
            return
        with self._lock:
            total, self._total = self._total, 0
            if total:
                self._kernels.close()
                self._bar.start(total)
        self._bar.advance(n_bytes)

    def __enter__(self) -> RunBar:
        return self

    def __exit__(self, *error: Any) -> None:
        self._kernels.close()
        self._bar.__exit__(*error)
