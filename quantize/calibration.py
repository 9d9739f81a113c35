"""Calibration as this package sees it: something that knows activations helps to decide and to encode.

`gguf_tools.Calibration` is one. A front takes it as an option. It promises importances before a weight
is read, so that the plan is the one of a file with an importance matrix. When the run is executed, it makes
the tensors whose activations it sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata

if TYPE_CHECKING:
    from quantize.fill.job import Calibrator, FillJob, Output
    from quantize.importances.entries import ImportanceFile
    from quantize.plan.plan import Plan
    from quantize.run_options import RunOptions

METHOD_KEY = "gguf_tools.calibration.method"
"""Metadata key: how a file was calibrated. Its text is in the keys of text_sketch.py."""

REFINED_KEY = "gguf_tools.refine"
"""Metadata key of a refined file: what decided its scales, a digest in hexadecimal."""


class Calibrating(Protocol):
    """A calibration, as a front takes it."""

    @property
    def label(self) -> str:
        """The method in a few words, for metadata and cards."""
        ...

    def begin(self) -> BegunCalibrating:
        """Begin to plan; what plans and runs share is kept in what this returns."""
        ...


class BegunCalibrating(Calibrating, Protocol):
    """A calibration of which there are plans and runs; it takes its own place."""

    def promise(self, metadata: Metadata, tensors: Sequence[TensorInfo]) -> ImportanceFile:
        """Promise entries, without numbers, for the tensors whose activations will be seen.

        metadata, tensors  of the input, as a GGUF file would have them
        raises             ToolkitError for a text or a model that can't be used
        """
        ...

    def open(self, plan: Plan, job: FillJob, options: RunOptions) -> AbstractContextManager[Calibrator]:
        """Open the calibrator of a run; leaving it without an error ends the run."""
        ...

    def estimate(self, plan: Plan, outputs: Sequence[Output], options: RunOptions) -> Iterable[str]:
        """Tell what a run will need: memory, disk and time."""
        ...


def begun(calibration: Calibrating | None) -> BegunCalibrating | None:
    """Begin a calibration, if there is one and it is not begun yet."""
    return None if calibration is None else calibration.begin()
