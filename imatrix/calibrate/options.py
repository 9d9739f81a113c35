"""Options of a calibration."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from gguf_tools.argument_types import CheckedFields, Seed
from imatrix.forward.options import CutChoices, ForwardOptions, ModelChoices
from imatrix.texts.tokens import Cut
from quantize.rounding.methods import Method, find_method


@dataclass(frozen=True)
class CalibrationOptions(CheckedFields):
    """How tensors are encoded under the activations of a text.

    text        UTF-8 file, or folder of which every file and every folder in it is a class of text
    cut         the part of it that is used, equally shared among classes
    sequential  encode every tensor under the inputs that the tensors before it, as they are written, produce,
                and correct for the drift; False: under the original's inputs, which takes half the time
    method      name of the rounding method, a key of `quantize.rounding.methods.METHODS`
    embedding   round token_embd under the covariance of the gradients there
    seed        decides which labels are drawn for gradients
    any_text    use the text even if it is nonsense; see imatrix/texts/quality.py
    forward     how the model is computed; `n_threads` is that of the run
    """

    text: str | os.PathLike[str]
    cut: Cut = field(default_factory=Cut)
    sequential: bool = True
    method: str = "two-sided"
    embedding: bool = True
    seed: Seed = 0
    any_text: bool = False
    forward: ForwardOptions = field(default_factory=ForwardOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        find_method(self.method)  # refuses a name that is not in the table

    @property
    def rounding(self) -> Method:
        return find_method(self.method)

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward pass comes first."""
        return self.rounding.needs_gradients or self.embedding

    @property
    def n_models(self) -> int:
        """How many models go through the text: the original, and the one that is being written."""
        return 2 if self.sequential else 1


class CalibrationChoices(CutChoices, ModelChoices, total=False):
    """The fields of CalibrationOptions, and of the Cut and ForwardOptions in it, as keyword arguments.

    Threads and scheduler are those of the run.
    """

    cut: Cut
    sequential: bool
    method: str
    embedding: bool
    seed: Seed
    any_text: bool
    forward: ForwardOptions
