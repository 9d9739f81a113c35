"""Options of a calibration, and which tensors a forward pass will reach, from names and metadata alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_tools.argument_types import CheckedFields
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from gguf_tools.number_types import Seed
from imatrix.forward.choices import CutChoices, ModelChoices
from imatrix.forward.options import ForwardOptions
from imatrix.texts.mixture import mixture_sha256, read_mixture
from imatrix.texts.tokens import Cut, Text, Vocabulary
from quantize.fill.scaled import refuse_scales
from quantize.formats.codecs import ignores_importances
from quantize.plan.decide import TensorPlan
from quantize.rounding.methods import Method, find_method

if TYPE_CHECKING:
    from imatrix.forward.network import Network

_MATRIX = re.compile(r"blk\.(\d+)\..*\.weight")


@dataclass(frozen=True)
class Coverage:
    """A model's network, and which of the tensors it reaches."""

    network: Network

    @classmethod
    def of(cls, path: Path, metadata: Metadata, tensors: Iterable[TensorInfo]) -> Coverage:
        """Build the network of a model.

        path    for messages
        raises  as `network_of_tensors`; BadRequest for a model whose weights have scales
        """
        from imatrix.forward.rehearsal import network_of_tensors

        by_name = {tensor.name: tensor for tensor in tensors}
        network = network_of_tensors(path, metadata, by_name)
        refuse_scales(path, by_name, network.own_scales)
        return cls(network)

    def promises(self, tensor: TensorInfo) -> bool:
        """Whether there will be importances of a tensor: as from llama-imatrix, of all matrices in layers."""
        match = _MATRIX.fullmatch(tensor.name)
        return match is not None and len(tensor.shape) > 1 and int(match[1]) < self.network.n_all_layers

    def makes(self, tensor: TensorPlan, method: Method, *, embedding: bool) -> bool:
        """Whether a tensor's bytes depend on its inputs, or on gradients.

        embedding  whether gradients at the embedding are known
        """
        from imatrix.forward.network import EMBEDDINGS, OUTPUT

        target = tensor.target_type
        if tensor.is_copied or tensor.keeps_codes or not target.is_quantized:
            return False
        if tensor.name == EMBEDDINGS:
            return embedding and method.can_encode(target)
        if tensor.name != OUTPUT and not self.promises(tensor.info):
            return False
        return method.can_encode(target) or not ignores_importances(target.name)


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
    _last: list[tuple[Any, Text]] = field(default_factory=list, init=False, repr=False, compare=False)

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

    def read(self, metadata: Metadata, coverage: Coverage) -> Text:
        """Read the chunks of the text, as the tokenizer of a model cuts it.

        Plans and runs of one model ask for the same text, so it is kept until its words or the tokenizer
        are others.
        """
        path, vocab_size = Path(self.text), coverage.network.vocab_size
        vocab = Vocabulary(metadata)
        asked = mixture_sha256(path), vocab, vocab_size
        if not self._last or self._last[0][0] != asked:
            self._last[:] = [(asked, read_mixture(path, vocab, vocab_size, self.cut))]
        return self._last[0][1]


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
