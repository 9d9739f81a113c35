"""The network of a model whose tensors it all uses: a rehearsal of reading them, which reads no weight.

Every layer is built once with tensors of the right shapes that have no values. What is asked for on the way
is what the network uses. A tensor that nothing asks for would have no part in what is computed, whatever it
is meant for, so a model that has one is refused, as llama.cpp refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from gguf_tools.errors import UnexpectedTensors
from gguf_tools.format.hparams import architecture_of
from gguf_tools.format.values import Metadata
from imatrix.forward.device import CPU
from imatrix.forward.families import find_family, network_of_family
from imatrix.forward.hidden_states import MemoryStates
from imatrix.forward.layers.load import Loader
from imatrix.forward.mtp import draft_head, own_embeddings, with_mtp
from imatrix.forward.network import EMBEDDINGS, Network
from quantize.fill.scaled import sides_of
from quantize.fill.sources import Described
from quantize.roles import layer_of


def network_of_tensors(path: Path, metadata: Metadata, tensors: Mapping[str, Described]) -> Network:
    """Build the network of a model by its keys, as llama.cpp takes them.

    path      of the model, for messages
    metadata  the keys of a GGUF file, or those that a conversion would write
    tensors   by name; no weight is read
    raises    UnsupportedCheckpoint for a family that can't be computed, or a key that the forward pass does
              not compute as llama.cpp; FormatError, MissingTensor, ShapeError; UnexpectedTensors naming
              tensors that the network does not use
    """
    architecture = architecture_of(metadata)
    family = find_family(path, architecture)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    network = with_mtp(network_of_family(family, family.read_file(metadata, shapes, path)), shapes)
    used = _used(network, path, tensors)
    used |= {side for name in used & tensors.keys() for side in sides_of(tensors[name])}
    left = [name for name in tensors if name not in used and not network.leaves_out(layer_of(name))]
    if left:
        shown = f"{', '.join(left[:_SHOWN])}{' ...' * (len(left) > _SHOWN)}"
        raise UnexpectedTensors(
            f"{path}: {len(left)} tensor{'s' * (len(left) > 1)} that this model has no use for ({shown}),"
            f" expected those of {architecture} alone"
        )
    return network


_SHOWN = 4
"""Number of names in a message."""


@dataclass(frozen=True)
class _Rehearsal(Loader):
    """Gives tensors without values, and notes their names."""

    used: set[str] = field(default_factory=set)

    def tensor(self, name: str) -> Any:
        tensor = super().tensor(name)
        self.used.add(name)
        return tensor

    def leave(self, *names: str) -> None:
        self.used.update(names)

    def rows(self, tensor: Any, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        if len(tensor.shape) == 1:
            return torch.ones((stop - start, tensor.shape[-1]), dtype=dtype)
        return torch.empty((stop - start, tensor.shape[-1]), dtype=dtype, device="meta")

    def numbers(self, tensor: Any) -> npt.NDArray[np.int32]:
        return np.zeros(tensor.shape, np.int32)


def _used(network: Network, path: Path, tensors: Mapping[str, Described]) -> set[str]:
    """Return the names of the tensors that a network reads."""
    load = _Rehearsal(path, cast(Mapping[str, Any], tensors), CPU, torch.float32)
    rotate = network.rope.rotation(1, load.device)
    for name in dict.fromkeys((EMBEDDINGS, network.output)):
        load.matrix(name, network.vocab_size, network.hidden_size)
    network.load_end(load)
    for number in range(network.n_all_layers):
        layer = network.build(load, number, rotate)
        if layer.experts is not None:
            layer.experts.read(0)
    if network.n_mtp:
        head = draft_head(network, load, MemoryStates(1, network.state_size))
        load.tensor(head.matrix)
        own_embeddings(network, load)
    return load.used
