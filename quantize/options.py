"""Options of a quantized file, apart from its source and its file type."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gguf_tools.argument_types import CheckedFields
from gguf_tools.format.values import Value
from quantize.calibration import Calibrating
from quantize.importances.entries import ImportanceFile
from quantize.importances.files import ImportanceSource, importance_file
from quantize.padding.padding import PadChoice
from quantize.plan.decide import PlanOptions
from quantize.plan.recipe_files import Mixture


@dataclass(frozen=True)
class QuantizeOptions(CheckedFields):
    """Options of a quantized file; the defaults are llama-quantize's.

    importances   a path, what `imatrix.load` returns, or a mapping tensor name -> Importance or array
    types         types set by hand, on top of the recipe file's
    keep_split    one output per shard of the source, named OUTPUT-00001-of-0000N.gguf
    kv_overrides  metadata that replace or join those of the source, in order
    calibration   how tensors are encoded under the activations of a text: `gguf_tools.Calibration`;
                  None: each by its own rows and importances
    pad           which inner sizes are made longer with zeros, so that rows are whole blocks: "auto", "256",
                  or "off", which takes such zeros away; None: sizes stay as they are
    pad_hidden    make the hidden size longer, too, which costs time and maybe memory for each token
    keep_grid     let tensors whose weights lie on a grid of 4 bits keep it; see quantize/grids.py
    provenance    let the output say what its tensors are made of, so that a later run can reuse them
    """

    importances: ImportanceSource | None = None
    types: PlanOptions | None = None
    keep_split: bool = False
    kv_overrides: Iterable[tuple[str, Value]] = ()
    provenance: bool = True
    calibration: Calibrating | None = None
    pad: PadChoice | None = None
    pad_hidden: bool = False
    keep_grid: bool = False

    @property
    def matrix(self) -> ImportanceFile | None:
        """The importances, as a file holds them; raises what `imatrix.load` raises for a path."""
        return None if self.importances is None else importance_file(self.importances)

    def types_for(self, mixture: Mixture) -> PlanOptions:
        """Put `types` on top of those of a recipe file."""
        types = mixture.with_options(self.types).options
        return replace(types, keep_order=True) if self.keep_split else types
