"""Network: a model as the forward pass sees it; Family: what makes one of a folder or a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forward.layer import Layer
from forward.load import Loader
from forward.rope import Rope, Rotation
from gguf_tools.values import Metadata

EMBEDDINGS, OUTPUT, OUTPUT_NORM = "token_embd.weight", "output.weight", "output_norm.weight"


@dataclass(frozen=True)
class Network:
    """A model as the forward pass sees it.

    n_layers    layers to compute; those for multi-token prediction are left out
    output      name of the matrix that makes logits of hidden states
    norm_eps    epsilon of the norm before it
    build       (loader, layer number, rotation) -> the layer with its weights
    n_chosen    positions that a token attends to at most, where indexers choose them; None: all
    """

    n_layers: int
    hidden_size: int
    vocab_size: int
    output: str
    norm_eps: float
    rope: Rope
    build: Callable[[Loader, int, Rotation], Layer]
    n_chosen: int | None = None

    @property
    def is_tied(self) -> bool:
        """Whether the embeddings are the output matrix, too."""
        return self.output == EMBEDDINGS


@dataclass(frozen=True)
class Family:
    """A model family.

    read     (metadata, tensor name -> shape, path) -> the family's configuration
    build    configuration -> the network
    choices  options of the converter for a folder: "mla" "none" gives plain attention
    """

    read: Callable[[Metadata, Mapping[str, tuple[int, ...]], Path], Any]
    build: Callable[[Any], Network]
    choices: Mapping[str, object]
