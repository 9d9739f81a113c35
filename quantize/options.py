"""Options of a file, as values and as keyword arguments: those of all files, and those of a quantized one.

A field that the command line has a flag for bears it, with its help and its default. This module is imported
for --help, so what takes long to load is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

from gguf_tools.argument_types import CheckedFields
from gguf_tools.choices import flag
from gguf_tools.format.values import Value
from quantize.calibration import Calibrating
from quantize.importances import ImportanceSource
from quantize.padding import PAD_WORDS, PadChoice, parse_pad
from quantize.plan.decide import PlanOptions
from quantize.run_options import RunChoices

if TYPE_CHECKING:
    from quantize.importances.entries import ImportanceFile
    from quantize.plan.recipe_files import Mixture


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
        "inner sizes that are no multiple of 256 get zeros at their end, so that K- and IQ-types fit. The"
        " model computes the same. auto: where types would fall back and the file gets better for its size;"
        " 256: wherever rows do not fit; KEY,...: the sizes that these metadata keys give, such as"
        " expert_feed_forward_length; off: no zeros, and those of a padded input are taken away (default:"
        " sizes stay as they are{or_with_size})",
        parse=parse_pad,
        metavar="{auto,256,off,KEY,...}",
        words=PAD_WORDS,
    )
    pad_hidden: bool = flag(
        False,
        "pad the hidden size, too: each token costs more time, and more memory of the cache where heads are"
        " added; norms and their epsilon are scaled to match",
    )
    keep_grid: bool = flag(
        False,
        "tensors whose weights are 4-bit codes times a scale for every 32, as in Kimi K2's INT4 experts and"
        " Gemma's QAT checkpoints, become Q4_0 with the same codes; {type} is for the others",
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
