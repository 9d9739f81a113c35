"""Options of a conversion, as a value and as keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf_tools.argument_types import CheckedFields
from gguf_tools.number_types import Count, PositiveBytes
from quantize.calibration import Calibrating
from quantize.importances.files import ImportanceSource
from quantize.padding.padding import PadChoice
from quantize.plan.decide import PlanOptions
from quantize.plan.recipe_files import Mixture
from quantize.roles import MLALayout, Program
from quantize.run_options import RunChoices


@dataclass(frozen=True)
class ConvertOptions(CheckedFields):
    """Options of a conversion; the defaults are those of the command.

    outtype          "f32", "f16", "bf16", "q8_0", or "auto": the checkpoint's own 16-bit type, BF16 for a
                     quantized checkpoint. Or a file type of the quantizer (Q4_K_M ...), a recipe file or its
                     mixture: the result is that of converting to F32 and quantizing, in one pass
    importances      for such a file type: a path, what `imatrix.load` returns, or a mapping tensor name ->
                     Importance or array
    types            for such a file type: types set by hand, on top of the recipe file's
    mla              "split" for llama.cpp, "both" for ik_llama.cpp, "none" for plain attention. None: as
                     `program` wants it
    mtp              keep the multi-token-prediction layers
    family           other options of the model's family, by name
    model_name       general.name
    metadata_file    JSON file with general.* values, which replace what the folder says
    pre_tokenizer    name to write when the tokenizer's own rules are not recognised
    vocab_only       write the tokenizer and no tensors
    mmproj           write the vision tower, and the audio tower with it, in place of the text part
    allow_pickle     read .bin and .pt checkpoints too, by torch's reader that runs no code
    big_endian       write for a big-endian machine
    split_max_bytes, split_max_tensors   start a new shard at these limits; None: one file
    tensor_first_split   let the first shard have tensors, not only metadata
    provenance       for a file type of the quantizer: let the output say what its tensors are made of, so
                     that a later run can reuse them
    calibration      for such a file type: see QuantizeOptions
    program          the program that the file is for; None: ik_llama.cpp where a type is named that only it
                     reads, llama.cpp otherwise
    pad, pad_hidden, keep_grid  see QuantizeOptions

    `mla`, `mtp` and `family` are options that a family declares. None leaves the family its default; one that
    the family of the checkpoint has not declared is refused.
    """

    outtype: str | Mixture = "auto"
    importances: ImportanceSource | None = None
    types: PlanOptions | None = None
    mla: MLALayout | None = None
    mtp: bool | None = None
    model_name: str | None = None
    metadata_file: Path | None = None
    pre_tokenizer: str | None = None
    vocab_only: bool = False
    mmproj: bool = False
    allow_pickle: bool = False
    big_endian: bool = False
    split_max_bytes: PositiveBytes | None = None
    split_max_tensors: Count | None = None
    provenance: bool = True
    tensor_first_split: bool = True
    calibration: Calibrating | None = None
    family: Mapping[str, object] | None = None
    program: Program | None = None
    pad: PadChoice | None = None
    pad_hidden: bool = False
    keep_grid: bool = False

    @property
    def family_choices(self) -> dict[str, object]:
        """The given options of the family, by name."""
        choices = {"mla": self.mla, "mtp": self.mtp, **(self.family or {})}
        return {name: value for name, value in choices.items() if value is not None}


class ConvertChoices(RunChoices, total=False):
    """The fields of ConvertOptions and RunOptions as keyword arguments, but for the type."""

    importances: ImportanceSource | None
    types: PlanOptions | None
    mla: MLALayout | None
    mtp: bool | None
    model_name: str | None
    metadata_file: Path | None
    pre_tokenizer: str | None
    vocab_only: bool
    mmproj: bool
    allow_pickle: bool
    big_endian: bool
    split_max_bytes: PositiveBytes | None
    split_max_tensors: Count | None
    provenance: bool
    tensor_first_split: bool
    calibration: Calibrating | None
    family: Mapping[str, object] | None
    program: Program | None
    pad: PadChoice | None
    pad_hidden: bool
    keep_grid: bool
