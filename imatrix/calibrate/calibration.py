"""A calibration as `quantize` and `convert` take it: it promises importances, and opens runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gguf_tools.findings import Tell, tell_all, tell_nobody
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from imatrix.calibrate.options import CalibrationOptions, Coverage
from imatrix.forward.options import require_torch
from imatrix.texts.mixture import mixture_sha256
from imatrix.texts.quality import TextQuality, admit, judge
from imatrix.texts.scripts import script_findings
from imatrix.texts.tokens import Text
from quantize.fill.job import Calibrator, FillJob, Output
from quantize.fill.options import FillOptions
from quantize.importances.entries import ImportanceFile, PromisedImportance
from quantize.importances.text_sketch import TextSketch
from quantize.plan.plan import Plan


@dataclass(frozen=True)
class Calibration(CalibrationOptions):
    """A calibration, as `quantize` and `convert` take it; its fields are those of `CalibrationOptions`.

    >>> import gguf_tools
    >>> gguf_tools.Calibration("calibration.txt").label
    'two-sided, layer after layer'
    """

    @property
    def label(self) -> str:
        """See `quantize.calibration.Calibrating`."""
        order = "layer after layer" if self.sequential else "each tensor by itself"
        return f"{self.method}, {order}" + ("" if self.embedding else ", token_embd left out")

    def promise(self, metadata: Metadata, tensors: Sequence[TensorInfo]) -> ImportanceFile:
        """See `quantize.calibration.Calibrating`."""
        require_torch("calibrating")
        coverage = Coverage.of(Path(self.text), metadata, tensors)
        entries = {
            tensor.name: PromisedImportance.of(tensor) for tensor in tensors if coverage.promises(tensor)
        }
        text = self.read(metadata, coverage)
        self._admit(text, tell_nobody)
        return ImportanceFile(
            entries,
            (Path(self.text).name,),
            text.n_chunks,
            text.chunk_size,
            sketch=TextSketch.of(text.tokens.ravel(), mixture_sha256(Path(self.text))),
        )

    @contextmanager
    def open(self, plan: Plan, job: FillJob, options: FillOptions) -> Iterator[Calibrator]:
        """See `quantize.calibration.Calibrating`."""
        require_torch("calibrating")
        from imatrix.calibrate.estimate import amount_findings
        from imatrix.calibrate.plan import CalibrationPlan
        from imatrix.calibrate.run.run import CalibratedRun

        what = CalibrationPlan.of(self, plan, job.outputs, lambda text: self._admit(text, options.tell))
        with CalibratedRun(what, job, options) as run:
            amount = amount_findings(what, options.threads)
            tell_all((*script_findings(what.spelling), *amount, *what.findings()), options.tell)
            yield run

    def estimate(self, plan: Plan, outputs: Sequence[Output], options: FillOptions) -> Iterator[str]:
        """See `quantize.calibration.Calibrating`."""
        require_torch("calibrating")
        from imatrix.calibrate.estimate import amount_findings, estimate_lines
        from imatrix.calibrate.plan import CalibrationPlan

        what = CalibrationPlan.of(self, plan, outputs, judge)
        yield from estimate_lines(what, options.threads, options.scheduler)
        amount = amount_findings(what, options.threads)
        text = (*what.quality.findings(), *script_findings(what.spelling))
        for finding in (*text, *amount, *what.findings()):
            yield f"note: {finding.text}"

    def _admit(self, text: Text, tell: Tell) -> TextQuality:
        return admit(text, str(self.text), tell, any_text=self.any_text)
