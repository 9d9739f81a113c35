"""A calibration as `quantize` and `convert` take it: it promises importances, and opens runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.choices import Choices
from calibrate.coverage import Coverage
from forward.device import require_torch
from forward.text.quality import admit, judge
from gguf_tools.files.inputs import AnyInput
from gguf_tools.findings import tell_nobody
from gguf_tools.format import keys
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from quantize.calibration import PromisedImportance
from quantize.fill.calibrated import Calibrator
from quantize.fill.encode import FillJob
from quantize.fill.options import FillOptions
from quantize.fill.session import Output
from quantize.importances.entries import ImportanceFile
from quantize.plan.plan import Plan

if TYPE_CHECKING:
    from calibrate.footprint import Shapes


@dataclass(frozen=True)
class Calibration(Choices):
    """A calibration, as `quantize` and `convert` take it; its fields are those of `Choices`."""

    def promise(self, metadata: Metadata, tensors: Sequence[TensorInfo]) -> ImportanceFile:
        """See `quantize.calibration.Calibrating`."""
        require_torch("calibrating")
        coverage = Coverage.of(Path(self.text), metadata, tensors)
        entries = {
            tensor.name: PromisedImportance.of(tensor) for tensor in tensors if coverage.promises(tensor)
        }
        text = self.read(metadata, coverage)
        admit(text, str(self.text), tell_nobody, any_text=self.any_text)
        return ImportanceFile(entries, (Path(self.text).name,), text.n_chunks, text.chunk_size)

    @contextmanager
    def open(
        self,
        plan: Plan,
        outputs: Sequence[Output],
        job: FillJob,
        inputs: Sequence[AnyInput],
        options: FillOptions,
    ) -> Iterator[Calibrator]:
        """See `quantize.calibration.Calibrating`."""
        require_torch("calibrating")
        from calibrate.estimate import large_text_findings
        from calibrate.run.run import CalibratedRun

        with CalibratedRun(self, plan, outputs, job, inputs, options) as run:
            if self.cut.n_chunks is None:
                shapes = self._shapes(plan, outputs)
                for finding in large_text_findings(self, shapes, run.text, options.threads):
                    options.tell(finding)
            yield run

    def estimate(self, plan: Plan, outputs: Sequence[Output], options: FillOptions) -> Iterator[str]:
        """See `quantize.calibration.Calibrating`."""
        require_torch("calibrating")
        from calibrate.estimate import estimate_lines, large_text_findings

        shapes = self._shapes(plan, outputs)
        text = self.read(outputs[0].layout.metadata, Coverage(shapes.network))
        yield from estimate_lines(self, shapes, text, options.threads)
        findings = list(judge(text).findings())
        if self.cut.n_chunks is None:
            findings += large_text_findings(self, shapes, text, options.threads)
        for finding in findings:
            yield f"note: {finding.text}"

    def _shapes(self, plan: Plan, outputs: Sequence[Output]) -> Shapes:
        """Return what an estimate has to know of the model."""
        from calibrate.footprint import Shapes, heads_of

        metadata = outputs[0].layout.metadata
        coverage = Coverage.of(outputs[0].path, metadata, plan.infos)
        made = [each.info for each in plan.tensors if coverage.makes(each, embedding=self.embedding)]
        arch = metadata[keys.ARCHITECTURE].data
        used = metadata.get(keys.EXPERT_USED_COUNT.format(arch=arch))
        n_used = 1 if used is None else used.data
        return Shapes(coverage.network, plan.infos, made, n_used, heads_of(metadata))
