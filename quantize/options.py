"""Options of a file, as values and as keyword arguments: those of all files, and those of a quantized one.

A field that the command line has a flag for bears it, with its help and its default. This module is
imported for --help, so what takes long to load is imported where it is used.

A calibration is an option, too. As this package sees it, something that knows activations helps to decide
and to encode; `gguf_tools.Calibration` is one. It promises importances before a weight is read, so that the
plan is the one of a file with an importance matrix. When the run is executed, it makes the tensors whose
activations it sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypedDict

from gguf_tools.argument_types import CheckedFields
from gguf_tools.choices import flag
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from quantize.importances import ImportanceSource
from quantize.padding import PAD_WORDS, PadChoice, parse_pad
from quantize.plan.decide import PlanOptions
from quantize.run_options import RunChoices

if TYPE_CHECKING:
    from quantize.fill.filling import Calibrator, FillJob, Output
    from quantize.importances.entries import ImportanceFile
    from quantize.plan.plan import Plan
    from quantize.plan.recipe_files import Mixture
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

    def begin(self) -> BegunCalibrating:
        """Begin to plan; what plans and runs share is kept in what this returns."""


class BegunCalibrating(Calibrating, Protocol):
    """A calibration of which there are plans and runs; it takes its own place."""

    def promise(self, metadata: Metadata, tensors: Sequence[TensorInfo]) -> ImportanceFile:
        """Promise entries, without numbers, for the tensors whose activations will be seen.

        metadata, tensors  of the input, as a GGUF file would have them
        raises             ToolkitError for a text or a model that can't be used
        """

    def open(self, plan: Plan, job: FillJob, options: RunOptions) -> AbstractContextManager[Calibrator]:
        """Open the calibrator of a run; leaving it without an error ends the run."""

    def estimate(self, plan: Plan, outputs: Sequence[Output], options: RunOptions) -> Iterable[str]:
        """Tell what a run will need: memory, disk and time."""


def begun(calibration: Calibrating | None) -> BegunCalibrating | None:
    """Begin a calibration, if there is one and it is not begun yet."""
    return None if calibration is None else calibration.begin()


@dataclass(frozen=True)
class FileOptions(CheckedFields):
    """Options of any file that is made, of a GGUF file or of a folder.

    importances   a path, what `imatrix.load` returns, or a mapping tensor name -> Importance or array
    types         types set by hand, on top of the recipe file's
    provenance    let the output say what its tensors are made of, so that a later run can reuse them
    calibration   how tensors are encoded under the activations of a text: `gguf_tools.Calibration`;
                  None: each by its own rows and importances
    pad           which inner sizes are made longer with zeros, so that rows are whole blocks: "auto", "256",
                  or "off", which takes such zeros away; None: sizes stay as they are
    pad_hidden    make the hidden size longer, too, which costs time and maybe memory for each token
    keep_grid     let tensors whose weights lie on a grid of 4 bits keep it; see quantize/grids.py
    """

    importances: ImportanceSource | None = None
    types: PlanOptions | None = None
    provenance: bool = True
    calibration: Calibrating | None = None
    pad: PadChoice | None = flag(
        None,
        "lengthen inner sizes that are no multiple of 256 with zeros, so that K- and IQ-types fit. The model"
        " computes the same. auto: where types would fall back and the file gets better for its size;"
        " 256: wherever rows do not fit; KEY,...: the sizes that these metadata keys give, such as"
        " expert_feed_forward_length; off: no zeros, and remove those of a padded input (default:"
        " sizes stay as they are{or_with_size})",
        parse=parse_pad,
        metavar="{auto,256,off,KEY,...}",
        words=PAD_WORDS,
    )
    pad_hidden: bool = flag(
        False,
        "also pad the hidden size: each token takes more time, and more memory of the cache if heads are"
        " added; norms and their epsilon are scaled to match",
    )
    keep_grid: bool = flag(
        False,
        "write tensors whose weights are 4-bit codes with a scale for every 32, as in Kimi K2's INT4 experts"
        " and Gemma's QAT checkpoints, as Q4_0 with the same codes; {type} is for the other tensors",
    )

    @property
    def matrix(self) -> ImportanceFile | None:
        """The importances, as a file holds them; raises what `imatrix.load` raises for a path."""
        from quantize.importances.files import importance_file

        return None if self.importances is None else importance_file(self.importances)

    def types_for(self, mixture: Mixture) -> PlanOptions:
        """Put `types` on top of those of a recipe file."""
        return mixture.with_options(self.types).options


@dataclass(frozen=True)
class QuantizeOptions(FileOptions):
    """Options of a file that is made of a GGUF file; the defaults are llama-quantize's.

    keep_split    one output per shard of the source, named OUTPUT-00001-of-0000N.gguf
    kv_overrides  metadata that replace or join those of the source, in order
    """

    keep_split: bool = flag(False, "write as many parts as the input has")
    kv_overrides: Iterable[tuple[str, Value]] = ()

    def types_for(self, mixture: Mixture) -> PlanOptions:
        types = super().types_for(mixture)
        return replace(types, keep_order=True) if self.keep_split else types


class FileChoices(TypedDict, total=False):
    """The fields of FileOptions as keyword arguments."""

    importances: ImportanceSource | None
    types: PlanOptions | None
    provenance: bool
    calibration: Calibrating | None
    pad: PadChoice | None
    pad_hidden: bool
    keep_grid: bool


class QuantizeChoices(FileChoices, RunChoices, total=False):
    """The fields of QuantizeOptions and RunOptions as keyword arguments."""

    keep_split: bool
    kv_overrides: Iterable[tuple[str, Value]]
