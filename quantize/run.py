"""A planned run: what was decided, and how it is carried out; the same for all fronts.

Outputs that are there before it are finished as it would make them, its own in part, or not to be touched.
A finished output of the same plan is done: its header is the one that the run would write, down to every
offset, and it was written after the last change of whatever it is made of. No program can put the time of a
change (ctime) back, so an input that was edited, replaced or downloaded since is noticed.

Everything else under an output's name is replaced with `force` alone. What an interrupted run of the same
outputs has left is its own; see gguf_tools/files/early_checks.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_tools.dataframes import dataframe
from gguf_tools.errors import BadArgument, GGUFError
from gguf_tools.files.early_checks import is_unfinished, refuse_to_replace
from gguf_tools.files.inputs import AnyInput
from gguf_tools.findings import Finding
from gguf_tools.format.reader import GGUFFile
from gguf_tools.format.shown import types_table
from gguf_tools.progress import BYTES, KERNELS, WORK, Advance, Bar, Shown
from gguf_tools.system.files import changed_ns, read_at
from quantize.fill.encode import RowSources
from quantize.fill.filling import FillJob, Output
from quantize.fill.outputs import Written, write_outputs
from quantize.fill.provenance import PROVENANCE_KEY, with_provenance
from quantize.fill.reuse import reuse_outlook
from quantize.importances.files import StoredImportance, stored_inputs
from quantize.importances.text_sketch import SHA256_KEY
from quantize.options import BegunCalibrating
from quantize.prepare import Preparation
from quantize.run_options import RunOptions

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Result:
    """Result of a run.

    preparation  what was decided: the plan, the files with their layouts
    written      what was written, and how
    seconds      how long it took
    replaced     outputs in whose place other files were
    is_found     the outputs were there already, as asked, and nothing was written
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
        """The files that were made."""
        return self.preparation.paths

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
        return self.preparation.paths

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


class RunBar(Bar):
    """The bar of a run: over the bytes that it writes, or over the seconds of a calibration that makes them.

    A terminal shows the kernels that are compiled before, too.
    n_bytes  of all outputs; None: a calibration starts the bar
    """

    def __init__(self, label: str, show: Shown, n_bytes: int | None) -> None:
        super().__init__(label, WORK if n_bytes is None else BYTES, show)
        self._kernels = _KernelBar(self._show is True)
        self._starting = threading.Lock()
        self._n_bytes: float | None = n_bytes

    def told(self, run: RunOptions) -> RunOptions:
        """Let a run move these bars, and close this one before it tells what a user should know."""

        def tell(finding: Finding) -> None:
            self.close()
            run.tell(finding)

        return replace(run, compiling=self._kernels, calibrating=self, tell=tell)

    def start(self, total: float, done: float = 0) -> Advance:
        self._kernels.close()
        return super().start(total, done)

    def written(self, n_bytes: float) -> None:
        """Count bytes that are written, from any thread; the first start the bar."""
        if self._n_bytes is None:
            return
        with self._starting:
            total, self._n_bytes = self._n_bytes, 0
            if total:
                self.start(total)
        self.advance(n_bytes)

    def __exit__(self, *error: Any) -> None:
        self._kernels.close()
        super().__exit__(*error)


class _KernelBar(Bar):
    """The bar of kernels, on a terminal alone, if they take long."""

    def __init__(self, show: bool) -> None:
        super().__init__("", KERNELS, show)

    def start(self, total: float, done: float = 0) -> Advance:
        self._label = f"compiling {total} kernels, once"
        return super().start(total, done)


def execute_together(runs: Sequence[Run], how: RunOptions | None = None) -> list[Result]:
    """Carry out several runs from the same source, which is read once for all of them.

    The results are those of executing each run alone; see quantize/fill/outputs.py. A run whose outputs are
    there already, as it would make them, is done.
    raises  BadRequest for runs with the same output, OutputError for other files in the place of an output
            without `force`, and what `Run.execute` raises
    """
    how = how or RunOptions()
    paths = [path for run in runs for path in run.output_paths]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        remedy = "put {ftype} into the name of the output"
        raise BadArgument(f"{twice}: two types would go to this file; {remedy}")
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
    older = [tuple(path for path in run.output_paths if path.exists()) for run in runs]
    is_calibrated = any(run.calibration is not None for run in runs)
    n_bytes = sum(run.preparation.plan.total_bytes for run in runs)
    with RunBar(how.label, how.progress, None if is_calibrated else n_bytes) as bar, ExitStack() as stack:
        how = bar.told(how)
        jobs = [stack.enter_context(run.job(how)) for run in runs]
        written = write_outputs(jobs, how, bar.written)
    ended = time.monotonic()
    return [
        # Where an earlier session has published parts of a set, they are its own.
        Result(run.preparation, made, ended - run.started, () if made.n_resumed else before)
        for run, made, before in zip(runs, written, older, strict=True)
    ]


# ---- outputs that are there before a run


def are_finished(job: FillJob, *, is_calibrated: bool) -> bool:
    """Whether the outputs of a job are there as it would make them, as far as headers and times can tell.

    is_calibrated  the bytes depend on a text, too, which the metadata name unless provenance is left out
    """
    outputs, sources = job.outputs, job.sources
    if sources.remote or not all(output.path.is_file() for output in outputs):
        return False
    importances = [resolved.matrix for resolved in sources.importances.values()]
    if not all(isinstance(each, StoredImportance) for each in importances):
        return False  # numbers in memory, which no file's time speaks for
    if is_calibrated and SHA256_KEY not in outputs[0].layout.metadata:
        return False
    made_of = [Path(each) for each in (*job.inputs, *stored_inputs(importances))]
    return _are_older(made_of, [output.path for output in outputs]) and all(map(_is_same, outputs))


def refuse_or_replace(job: FillJob, how: RunOptions) -> None:
    """Raise OutputError for outputs that are there and that a run may not replace.

    A file that is to be reused may be the one that is replaced. An input is refused by its writer.
    """
    reused, inputs = set(map(os.path.realpath, how.old_files)), set(map(os.path.realpath, job.inputs))
    outputs = {os.path.realpath(output.path): output.path for output in job.outputs}
    others = [path for real, path in outputs.items() if real not in inputs]
    refuse_to_replace(others, force=how.force or how.replace or not reused.isdisjoint(outputs))


def _are_older(made_of: Iterable[Path], outputs: Iterable[Path]) -> bool:
    """Whether files were last changed, renamed or replaced before any of the outputs was written."""
    try:
        written = min(path.stat().st_mtime_ns for path in outputs)
        return all(changed_ns(path.stat()) < written for path in made_of)
    except OSError:
        return False


def _is_same(output: Output) -> bool:
    """Whether a file has the size and the header of an output, whatever its provenance says."""
    planned, path = output.layout, output.path
    try:
        if path.stat().st_size != planned.total_bytes:
            return False
        with GGUFFile(path) as file:
            provenance = file.metadata.get(PROVENANCE_KEY)
            if provenance is not None and PROVENANCE_KEY in planned.metadata:
                planned = with_provenance(planned, provenance)
            return read_at(file.fileno(), len(planned.header), 0) == planned.header
    except (GGUFError, OSError):
        return False
