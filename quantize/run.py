"""A planned run: what was decided, and how it is carried out; the same for all fronts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_tools.dataframes import dataframe
from gguf_tools.errors import BadArgument
from gguf_tools.files.early_checks import is_unfinished
from gguf_tools.files.inputs import AnyInput
from gguf_tools.format.shown import types_table
from quantize.calibration import BegunCalibrating
from quantize.fill.encode import RowSources
from quantize.fill.job import FillJob
from quantize.fill.outputs import Written, write_outputs
from quantize.fill.reuse import reuse_outlook
from quantize.finished import are_finished, refuse_or_replace
from quantize.prepare import Preparation
from quantize.run_options import RunBar, RunOptions

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Result:
    """Result of a run.

    replaced  outputs in whose place other files were
    is_found  the outputs were there already, as asked, and nothing was written
    """

    preparation: Preparation
    written: Written
    seconds: float
    replaced: tuple[Path, ...] = ()
    is_found: bool = False

    def __repr__(self) -> str:
        done = self.preparation
        where = f"{self.paths[0]}{' ...' if len(self.paths) > 1 else ''}"
        return f"<Result: {where}, {done.plan.file_type}, {done.total_bytes:,} bytes in {self.seconds:.1f} s>"

    def _repr_html_(self) -> str:
        return types_table(repr(self), self.preparation.plan.infos)

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(output.path for output in self.preparation.outputs)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each tensor: its types, its size in bytes, and why it has its type."""
        return [
            {
                "tensor": each.name,
                "shape": each.shape,
                "from": each.source_type.name,
                "type": each.target_type.name,
                "n_bytes": each.info.n_bytes,
                "bits_per_weight": 8 * each.info.n_bytes / each.info.n_elems,
                "reason": each.reason,
            }
            for each in self.preparation.plan.tensors
        ]

    def to_dataframe(self) -> pandas.DataFrame:
        """Return `rows` as a table of pandas; raises BadRequest where pandas is missing."""
        return dataframe(self.rows())

    def to_json(self) -> dict[str, Any]:
        """The plan and the outcome as plain data."""
        done, written = self.preparation, self.written
        return {
            **done.plan.to_json(done.total_bytes),
            "paths": list(map(str, self.paths)),
            "replaced": list(map(str, self.replaced)),
            "already_there": self.is_found,
            "seconds": self.seconds,
            "compile_seconds": written.compile_seconds,
            "limit": written.limit,
            "chunks": written.n_chunks,
            "resumed_chunks": written.n_resumed,
            "reused_tensors": {str(path): count for path, count in written.reused.items()},
            "verified": written.verification is not None,
        }


@dataclass(frozen=True)
class Run:
    """A run that is planned, while its inputs are open; nothing is written before `execute`.

    preparation  what was decided
    sources      where the rows of each tensor come from
    inputs       files that are being read, which no output may replace, and which must not change meanwhile
    started      when planning began, on the clock of time.monotonic
    calibration  makes some of the tensors; None: all are encoded by their own rows
    """

    preparation: Preparation
    sources: RowSources
    inputs: tuple[AnyInput, ...]
    started: float = field(default_factory=time.monotonic)
    calibration: BegunCalibrating | None = None

    def __repr__(self) -> str:
        return f"<Run to {self.preparation.outputs[0].path}: {self.preparation.plan!r}>"

    def _repr_html_(self) -> str:
        return types_table(repr(self), self.preparation.plan.infos)

    def execute(self, run: RunOptions | None = None) -> Result:
        """Write and publish the outputs; raises ToolkitError, see `write_outputs`."""
        return execute_together([self], run)[0]

    @property
    def output_paths(self) -> tuple[Path, ...]:
        return tuple(output.path for output in self.preparation.outputs)

    @property
    def existing(self) -> tuple[Path, ...]:
        """The outputs that are there already."""
        return tuple(path for path in self.output_paths if path.exists())

    @property
    def plain_job(self) -> FillJob:
        """Job to be filled, without the calibrator of its calibrated tensors."""
        return FillJob(self.preparation.outputs, self.sources, self.inputs)

    @property
    def is_finished(self) -> bool:
        """Whether the outputs are there already, as they are asked for."""
        is_calibrated = self.calibration is not None
        return not is_unfinished(self.output_paths) and are_finished(
            self.plain_job, is_calibrated=is_calibrated
        )

    def needs(self, run: RunOptions) -> Iterator[str]:
        """Yield the needs of the run, in lines.

        Of a calibration, memory, disk and time; of each file that is to be reused, how much it may serve.
        """
        plan, outputs = self.preparation.plan, self.preparation.outputs
        if self.calibration is not None:
            yield from self.calibration.estimate(plan, outputs, run)
        yield from reuse_outlook(run.old_files, plan.infos, self.sources, outputs[0].layout.endian)

    @contextmanager
    def job(self, run: RunOptions) -> Iterator[FillJob]:
        """Give what is to be filled, with what makes its calibrated tensors."""
        job = self.plain_job
        if self.calibration is None:
            yield job
            return
        with self.calibration.open(self.preparation.plan, job, run) as calibrator:
            yield replace(job, calibrator=calibrator)


def execute_together(runs: Sequence[Run], how: RunOptions | None = None) -> list[Result]:
    """Carry out several runs from the same source, which is read once for all of them.

    The results are those of executing each run alone; see quantize/fill/outputs.py. A run whose outputs are
    there already, as it would make them, is done.
    raises  BadRequest for runs with the same output, OutputError for other files in the place of an output
            without `force`, and what `Run.execute` raises
    """
    how = how or RunOptions()
    paths = [output.path for run in runs for output in run.preparation.outputs]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise BadArgument(f"{twice}: two types would go there; put {{ftype}} into the name of the output")
    found = [not how.force and run.is_finished for run in runs]
    missing = [run for run, is_found in zip(runs, found, strict=True) if not is_found]
    for run in missing:
        refuse_or_replace(run.plain_job, how)
    made = iter(_execute(missing, how) if missing else ())
    return [
        Result(run.preparation, Written(0, 0), time.monotonic() - run.started, is_found=True)
        if is_found else next(made)
        for run, is_found in zip(runs, found, strict=True)
    ]  # fmt: skip


def _execute(runs: Sequence[Run], how: RunOptions) -> list[Result]:
    older = [run.existing for run in runs]
    is_calibrated = any(run.calibration is not None for run in runs)
    with RunBar(how.label, how.progress, is_calibrated=is_calibrated) as bar, ExitStack() as stack:
        how, progress = bar.told(how), [bar.start(run.preparation) for run in runs]
        jobs = [stack.enter_context(run.job(how)) for run in runs]
        written = write_outputs(jobs, how, progress)
    ended = time.monotonic()
    return [
        # Where an earlier session has published parts of a set, they are its own.
        Result(run.preparation, made, ended - run.started, () if made.n_resumed else before)
        for run, made, before in zip(runs, written, older, strict=True)
    ]
