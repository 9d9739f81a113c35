"""Options of a conversion, as a value and as keyword arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from convert.checkpoint.adapted_folder import AdaptedFolder
from gguf_tools.argument_types import NATURAL, SCALE, Count, PositiveBytes, Scale, metric_bytes
from gguf_tools.choices import flag
from gguf_tools.errors import BadArgument
from quantize.options import FileChoices, FileOptions
from quantize.roles import MLALayout, Program
from quantize.run_options import RunChoices

if TYPE_CHECKING:
    from quantize.plan.recipe_files import Mixture
    from quantize.type_names import FileType, OutType


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """An adapter of PEFT that is merged into a folder's weights while they are read.

    lora        its folder, or OWNER/NAME on the Hub; None for none
    lora_scale  what all that is added to weights is multiplied by
    """

    lora: Path | None = flag(
        None,
        "merge the PEFT adapter (LoRA, DoRA) in this folder, or OWNER/NAME on the Hub, into the weights of a"
        " model's folder while they are read",
        parse=Path,
        metavar="ADAPTER",
    )
    lora_scale: Scale = flag(
        1.0, "multiply what the adapter adds to weights (default: 1)", parse=SCALE.parse, metavar="X"
    )

    def adapted(self, folder: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Return a folder together with the adapter, if there is one."""
        if self.lora is None:
            if self.lora_scale != 1:
                raise BadArgument("--lora-scale scales an adapter, and there is no --lora")
            return folder
        # The Hub's client is loaded only where there is an adapter.
        from convert.checkpoint.hub import adapter_folder

        return AdaptedFolder(folder, adapter_folder(self.lora), self.lora_scale)


class AdapterChoices(TypedDict, total=False):
    """The fields of AdapterOptions as keyword arguments."""

    lora: Path | None
    lora_scale: Scale


@dataclass(frozen=True)
class ConvertOptions(AdapterOptions, FileOptions):
    """Options of a file that is made of a checkpoint; the defaults are those of the command.

    importances, types, provenance and calibration are for a file type of the quantizer. An adapter is merged
    as AdapterOptions says.

    outtype          "f32", "f16", "bf16", "q8_0", or "auto": the checkpoint's own 16-bit type, BF16 for a
                     quantized checkpoint. Or a file type of the quantizer (Q4_K_M ...), a recipe file or its
                     mixture: the result is that of converting to F32 and quantizing, in one pass
    mla              "split" for llama.cpp, "both" for ik_llama.cpp, "none" for plain attention. None: as
                     `program` wants it
    mtp              keep the multi-token-prediction layers
    family           other options of the model's family, by name
    program          the program that the file is for; None: ik_llama.cpp where a type is named that only it
                     reads, llama.cpp otherwise
    vocab_only       write the tokenizer and no tensors
    mmproj           write the vision tower, and the audio tower with it, in place of the text part
    allow_pickle     read .bin and .pt checkpoints too, without running their code
    big_endian       write for a big-endian machine
    split_max_bytes, split_max_tensors   start a new shard at these limits; None: one file
    tensor_first_split   let the first shard have tensors, not only metadata
    model_name       general.name
    metadata_file    JSON file with general.* values, which replace what the folder says
    pre_tokenizer    name to write when the tokenizer's own rules are not recognised

    `mla`, `mtp` and `family` are options that a family declares. None leaves the family its default; one that
    the family of the checkpoint has not declared is refused.
    """

    outtype: OutType | FileType | str | Mixture = "auto"
    mla: MLALayout | None = None
    mtp: bool | None = None
    family: Mapping[str, object] | None = None
    program: Program | None = None
    vocab_only: bool = flag(False, "write the tokenizer and no tensors")
    mmproj: bool = flag(
        False,
        "write the vision tower, and the audio tower if the model has one, to a separate file"
        " (mmproj-NAME.gguf), which llama.cpp's programs load together with the file of the text part",
    )
    allow_pickle: bool = flag(False, "read .bin and .pt checkpoints, as weights only")
    big_endian: bool = flag(False, "write for a big-endian machine", "--bigendian")
    split_max_bytes: PositiveBytes | None = flag(
        None, "start a new part at this size", "--split-max-size",
        parse=lambda text: metric_bytes(text) or None, metavar="N(M|G)",
    )  # fmt: skip
    split_max_tensors: Count | None = flag(
        None, "start a new part after this many tensors",
        parse=lambda text: NATURAL.parse(text) or None, metavar="N",
    )  # fmt: skip
    tensor_first_split: bool = flag(True, "keep tensors out of the first part")
    model_name: str | None = flag(None, "general.name in the file", metavar="NAME")
    metadata_file: Path | None = flag(
        None, "general.* values that replace those of the folder", "--metadata",
        parse=Path, metavar="FILE.json",
    )  # fmt: skip
    pre_tokenizer: str | None = flag(
        None, "llama.cpp's name of the pre-tokenizer, when tokenizer.json is not recognised", metavar="NAME"
    )

    @property
    def family_choices(self) -> dict[str, object]:
        """The given options of the family, by name."""
        choices = {"mla": self.mla, "mtp": self.mtp, **(self.family or {})}
        return {name: value for name, value in choices.items() if value is not None}


class ConvertChoices(AdapterChoices, FileChoices, RunChoices, total=False):
    """The fields of ConvertOptions and RunOptions as keyword arguments, but for the type."""

    mla: MLALayout | None
    mtp: bool | None
    family: Mapping[str, object] | None
    program: Program | None
    vocab_only: bool
    mmproj: bool
    allow_pickle: bool
    big_endian: bool
    split_max_bytes: PositiveBytes | None
    split_max_tensors: Count | None
    tensor_first_split: bool
    model_name: str | None
    metadata_file: Path | None
    pre_tokenizer: str | None
