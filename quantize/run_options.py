"""How a run goes, whatever it makes: threads, resuming, reuse, verifying, progress; shared by all fronts.

A front takes its options as values, or their fields as keyword arguments: `merge_choices` makes one of both.

The progress bars of a run that writes an output show the kernels that it compiles first, then its bytes. A
calibration has a third one, for what comes before its first tensor.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from gguf_tools.choices import refuse_unknown
from gguf_tools.findings import Tell, teller
from gguf_tools.format.values import Value
from gguf_tools.progress import LAYERS, Bar, Progress, StartProgress, StartSteps, Unit
from quantize.calibration import Calibrating
from quantize.fill.options import FillOptions
from quantize.importances.files import ImportanceSource
from quantize.padding.padding import PadChoice
from quantize.plan.decide import PlanOptions
from quantize.prepare import Preparation

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Options = TypeVar("Options", bound=DataclassInstance)
    from quantize.prepare import Preparation


@dataclass(frozen=True)
class RunOptions(FillOptions):
    """How to run; nothing here changes a byte of the output.

    n_threads, restart, reuse, verify, scheduler, compiling, gradients, tell  see FillOptions
    force      replace outputs that are there, and make anew those that are as asked already
    replace    replace outputs that are there and are not as asked, as llama-quantize does
    progress   called once with what was decided; what it returns is then called with the bytes of every
               chunk, from the thread that has filled it. An exception from there ends the run like ctrl-C:
               finished work is kept for the next one. True: a bar on standard error
    """

    progress: Callable[[Preparation], Progress] | bool | None = None
    force: bool = field(default=False, kw_only=True)
    replace: bool = field(default=False, kw_only=True)


class RunChoices(TypedDict, total=False):
    """The fields of RunOptions as keyword arguments."""

    n_threads: int | None
    restart: bool
    force: bool
    replace: bool
    reuse: Iterable[str | os.PathLike[str]]
    verify: bool
    scheduler: str | None
    compiling: StartProgress
    gradients: StartSteps
    tell: Tell
    progress: Callable[[Preparation], Progress] | bool | None


class QuantizeChoices(RunChoices, total=False):
    """The fields of QuantizeOptions and RunOptions as keyword arguments."""

    importances: ImportanceSource | None
    types: PlanOptions | None
    keep_split: bool
    kv_overrides: Iterable[tuple[str, Value]]
    provenance: bool
    calibration: Calibrating | None
    pad: PadChoice | None
    pad_hidden: bool
    keep_grid: bool


def merge_choices(
    options: Options, run: RunOptions | None, choices: Mapping[str, Any]
) -> tuple[Options, RunOptions]:
    """Put the fields that `choices` name into `options` and `run`.

    run     None: the defaults
    raises  TypeError for a choice that is a field of neither, listing all
    """
    own = {each.name for each in fields(options)}
    shared = {each.name for each in fields(RunOptions)}
    refuse_unknown(choices, own | shared)
    return (
        replace(options, **{name: value for name, value in choices.items() if name in own}),
        replace(run or RunOptions(), **{name: choices[name] for name in choices if name in shared}),
    )


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
        """Let a run show these bars, and tell on standard error what a user should know."""
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
