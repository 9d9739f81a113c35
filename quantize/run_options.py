"""How a run goes, whatever it makes: threads, resuming, reuse, verifying, progress; shared by all fronts.

A front takes its options as values, or their fields as keyword arguments: `merge_choices` makes one of both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from gguf_tools.choices import refuse_unknown
from gguf_tools.findings import Tell
from gguf_tools.format.values import Value
from gguf_tools.progress import Progress, StartProgress, StartSteps
from quantize.calibration import Calibrating
from quantize.fill.options import FillOptions
from quantize.importances.files import ImportanceSource
from quantize.plan.decide import PlanOptions
from quantize.prepare import Preparation

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Options = TypeVar("Options", bound=DataclassInstance)
else:
    Options = TypeVar("Options")


@dataclass(frozen=True)
class RunOptions(FillOptions):
    """How to run; nothing here changes a byte of the output.

    n_threads, restart, reuse, verify, scheduler, compiling, gradients, tell  see FillOptions
    progress   called once with what was decided; what it returns is then called with the bytes of every
               chunk, from the thread that has filled it. An exception from there ends the run like ctrl-C:
               finished work is kept for the next one. True: a bar on standard error
    """

    progress: Callable[[Preparation], Progress] | bool | None = None


class RunChoices(TypedDict, total=False):
    """The fields of RunOptions as keyword arguments."""

    n_threads: int | None
    restart: bool
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


def merge_choices(
    options: Options, run: RunOptions | None, choices: Mapping[str, Any]
) -> tuple[Options, RunOptions]:
    """Return `options` and `run` with the fields that `choices` name in their place.

    run     None: the defaults
    raises  TypeError for a choice that is a field of neither, listing all
    """
    own = {field.name for field in fields(options)}
    shared = {field.name for field in fields(RunOptions)}
    refuse_unknown(choices, own | shared)
    return (
        replace(options, **{name: value for name, value in choices.items() if name in own}),
        replace(run or RunOptions(), **{name: choices[name] for name in choices if name in shared}),
    )
