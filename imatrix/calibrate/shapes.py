"""Which tensors of a model a calibration reaches, and their shapes, from names and metadata alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.format.hparams import architecture_of, known_hparams
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from quantize.fill.scaled import refuse_scales
from quantize.formats.codecs import ignores_importances
from quantize.plan.decide import TensorPlan
from quantize.roles import Role, layer_of, tensor_role
from quantize.rounding.methods import Method

if TYPE_CHECKING:
    from imatrix.forward.network import Network

_MATRIX = re.compile(r"blk\.(\d+)\..*\.weight")


def network_of_model(path: Path, metadata: Metadata, tensors: Iterable[TensorInfo]) -> Network:
    """Build the network of a model.

    path    for messages
    raises  as `network_of_tensors`; BadRequest for a model whose weights have scales
    """
    from imatrix.forward.open import network_of_tensors, refuse_encoder

    by_name = {tensor.name: tensor for tensor in tensors}
    network = network_of_tensors(path, metadata, by_name)
    refuse_encoder(path, network)
    refuse_scales(path, by_name, network.own_scales)
    return network


def promises(network: Network, tensor: TensorInfo) -> bool:
    """Whether there will be importances of a tensor: as from llama-imatrix, of all matrices in layers."""
    match = _MATRIX.fullmatch(tensor.name)
    return match is not None and len(tensor.shape) > 1 and int(match[1]) < network.n_all_layers


def makes(network: Network, tensor: TensorPlan, method: Method, *, embedding: bool) -> bool:
    """Whether a tensor's bytes depend on its inputs, or on gradients.

    embedding  whether gradients at the embedding are known
    """
    from imatrix.forward.network import EMBEDDINGS, OUTPUT

    target = tensor.target_type
    if tensor.is_copied or tensor.keeps_codes or not target.is_quantized:
        return False
    if tensor.name == EMBEDDINGS:
        return embedding and method.can_encode(target)
    if tensor.name != OUTPUT and not promises(network, tensor.info):
        return False
    return method.can_encode(target) or not ignores_importances(target.name)


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model, as far as an estimate needs them.

    infos    all tensors of the output
    made     those that are calibrated
    n_used   experts per token
    n_heads  of attention; the most where layers differ
    """

    network: Network
    infos: Sequence[TensorInfo]
    made: Sequence[TensorInfo]
    n_used: int
    n_heads: int

    @classmethod
    def of(
        cls, network: Network, infos: Sequence[TensorInfo], made: Sequence[TensorInfo], metadata: Metadata
    ) -> Shapes:
        """Read what the tensors do not tell from a file's metadata."""
        hparams = known_hparams(metadata, architecture_of(metadata) or "")
        heads = hparams.head_count
        n_heads = max(heads) if isinstance(heads, tuple) else hparams.size("head_count")
        return cls(network, infos, made, hparams.size("expert_used_count", 1), n_heads)

    def share(self, info: TensorInfo) -> float:
        """The share of the tokens that one matrix of a tensor sees."""
        return self.n_used / info.n_mats if is_expert(info) else 1.0

    def by_layer(self) -> Iterator[list[TensorInfo]]:
        """Yield the tensors of each layer."""
        layers: list[list[TensorInfo]] = [[] for _ in range(self.network.n_all_layers)]
        for info in self.infos:
            layer = layer_of(info.name)
            if layer is not None and layer < len(layers):
                layers[layer].append(info)
        yield from layers


_BLOCK_ROLES = (Role.FFN_GATE, Role.FFN_UP, Role.FFN_DOWN)


def is_expert(info: TensorInfo) -> bool:
    """Whether a tensor is a stack of routed experts."""
    return info.n_mats > 1 and tensor_role(info.name, info.shape).role in _BLOCK_ROLES


def is_block(info: TensorInfo) -> bool:
    """Whether a tensor is of the block that all tokens go through."""
    return not is_expert(info) and tensor_role(info.name, info.shape).role in _BLOCK_ROLES
