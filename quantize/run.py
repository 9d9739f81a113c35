"""A planned run: what was decided, and how it is carried out; the same for all fronts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from gguf_tools.progress import no_progress
from quantize.calibration import Calibrating
from quantize.fill.encode import FillJob
from quantize.fill.outputs import Written, write_outputs
from quantize.prepare import Preparation
from quantize.progress import ProgressBar
from quantize.run_options import RunOptions


@dataclass(frozen=True)
class Result:
    """What a run has done.

    replaced  outputs in whose place other files were
    """

    preparation: Preparation
    written: Written
    seconds: float
    replaced: tuple[Path, ...] = ()

    def __repr__(self) -> str:
        done = self.preparation
        where = f"{self.paths[0]}{' ...' if len(self.paths) > 1 else ''}"
        return f"<Result: {where}, {done.plan.file_type}, {done.total_bytes:,} bytes in {self.seconds:.1f} s>"

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(output.path for output in self.preparation.outputs)


@dataclass(frozen=True)
class Run:
    """A run that is planned, while its inputs are open; nothing is written before `execute`.

    preparation  what was decided
    job          where the rows of each tensor come from
    inputs       files that are being read, which no output may replace
    started      when planning began, on the clock of time.monotonic
    calibration  makes some of the tensors; None: all are encoded by their own rows
    """

    preparation: Preparation
    job: FillJob
    inputs: tuple[Path, ...]
    started: float = field(default_factory=time.monotonic)
    calibration: Calibrating | None = None

    def __repr__(self) -> str:
        return f"<Run to {self.preparation.outputs[0].path}: {self.preparation.plan!r}>"

    def execute(self, run: RunOptions | None = None) -> Result:
        """Write and publish the outputs; raises ToolkitError, see `write_outputs`."""
        run = run or RunOptions()
        if run.progress is True:
            with ProgressBar("writing") as bar:
                return self.execute(replace(run, progress=bar.start, compiling=bar.compiling))
        progress = run.progress(self.preparation) if run.progress else no_progress
        outputs = self.preparation.outputs
        older = tuple(output.path for output in outputs if output.path.exists())
        with self._calibrated(run) as job:
            written = write_outputs(outputs, job, self.inputs, run, progress)
        seconds = time.monotonic() - self.started
        # Where an earlier session has published parts of a set, they are its own.
        return Result(self.preparation, written, seconds, () if written.n_resumed else older)

    @contextmanager
    def _calibrated(self, run: RunOptions) -> Iterator[FillJob]:
        """Give the job, with what makes its calibrated tensors."""
        if self.calibration is None:
            yield self.job
            return
        plan, outputs = self.preparation.plan, self.preparation.outputs
        with self.calibration.open(plan, outputs, self.job, self.inputs, run) as calibrator:
            yield replace(self.job, calibrator=calibrator)
