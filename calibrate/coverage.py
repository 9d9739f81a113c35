"""Which tensors a forward pass will reach, told from names and metadata alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.methods import Method
from gguf_tools.format import keys
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from quantize.formats.codecs import ignores_importances
from quantize.plan.decide import TensorPlan

if TYPE_CHECKING:
    from forward.network import Network

_MATRIX = re.compile(r"blk\.(\d+)\..*\.weight")


@dataclass(frozen=True)
class Coverage:
    """A model's network, and which of the tensors it reaches."""

    network: Network

    @classmethod
    def of(cls, path: Path, metadata: Metadata, tensors: Iterable[TensorInfo]) -> Coverage:
        """Build the network of a model.

        path    for messages
        raises  UnsupportedCheckpoint for a family that can't be computed
        """
        from forward.families import find_family

        architecture = metadata.get(keys.ARCHITECTURE)
        family = find_family(path, None if architecture is None else architecture.data)
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        return cls(family.build(family.read(metadata, shapes, path)))

    def promises(self, tensor: TensorInfo) -> bool:
        """Whether there will be importances of a tensor: as from llama-imatrix, of all matrices in layers."""
        match = _MATRIX.fullmatch(tensor.name)
        return match is not None and len(tensor.shape) > 1 and int(match[1]) < self.network.n_layers

    def makes(self, tensor: TensorPlan, method: Method, *, embedding: bool) -> bool:
        """Whether a tensor's bytes depend on its inputs, or on gradients.

        embedding  whether gradients at the embedding are known
        """
        from forward.network import EMBEDDINGS, OUTPUT

        target = tensor.target_type
        if tensor.is_copied or not target.is_quantized:
            return False
        if tensor.name == EMBEDDINGS:
            return embedding and method.can_encode(target)
        if tensor.name != OUTPUT and not self.promises(tensor.info):
            return False
        return method.can_encode(target) or not ignores_importances(target.name)
