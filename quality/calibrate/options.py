"""A calibration as `quantize` and `convert` take it: it promises importances, and opens runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forward.device import require_torch
from gguf_tools import keys
from gguf_tools.inputs import AnyInput
from gguf_tools.tensors import TensorInfo
from gguf_tools.values import Metadata
from quality.calibrate.choices import Choices
from quality.calibrate.sight import Sight
from quantize.calibration import PromisedImportance
from quantize.fill.calibrated import Calibrator
from quantize.fill.encode import FillJob
from quantize.fill.options import FillOptions
from quantize.fill.session import Output
from quantize.importance import ImportanceFile
from quantize.plan.plan import Plan


@dataclass(frozen=True)
class Calibration(Choices):
    """A calibration, as `quantize` and `convert` take it; its fields are those of `Choices`."""

    def promise(self, metadata: Metadata, tensors: Sequence[TensorInfo]) -> ImportanceFile:
        """See `quantize.calibration.Calibrating`."""
        require_torch("calibrating")
        sight = Sight.of(Path(self.text), metadata, tensors)
        entries = {tensor.name: PromisedImportance.of(tensor) for tensor in tensors if sight.promises(tensor)}
        text = self.read(metadata, sight)
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
        from quality.calibrate.run import CalibratedRun

        with CalibratedRun(self, plan, outputs, job, inputs, options) as run:
            yield run

    def estimate(self, plan: Plan, outputs: Sequence[Output], options: FillOptions) -> Iterator[str]:
        """See `quantize.calibration.Calibrating`."""
        require_torch("calibrating")
        from quality.calibrate.estimate import estimate_lines
        from quality.calibrate.footprint import Shapes, heads_of

        metadata = outputs[0].layout.metadata
        sight = Sight.of(outputs[0].path, metadata, plan.infos)
        made = [each.info for each in plan.tensors if sight.makes(each, embedding=self.embedding)]
        arch = metadata[keys.ARCHITECTURE].data
        used = metadata.get(keys.EXPERT_USED_COUNT.format(arch=arch))
        n_used = 1 if used is None else used.data
        shapes = Shapes(sight.network, plan.infos, made, n_used, heads_of(metadata))
        yield from estimate_lines(self, shapes, self.read(metadata, sight), options.threads)
