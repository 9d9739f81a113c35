"""Facts about a model that the choice of types depends on, read from its GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass

from gguf_tools.errors import BadRequest
from gguf_tools.hparams import architecture_of, known_hparams
from gguf_tools.values import Metadata

ARCHITECTURES_WITH_OWN_RULES = frozenset({"falcon", "glm5-next", "bailingmoe3"})
"""Architectures for which llama.cpp's recipes have special rules; ours treat them like any other model."""


@dataclass(frozen=True)
class ModelFacts:
    """What the choice of types depends on, besides the tensors themselves.

    n_layers    `block_count`, which includes layers for multi-token prediction
    n_experts   routed experts per layer; 0 for a dense model
    n_heads     attention heads, None when the metadata does not say
    n_kv_heads  heads of keys and values; 1 when the file has the compressed MLA layout
    """

    architecture: str
    n_layers: int
    n_experts: int = 0
    n_heads: int | None = None
    n_kv_heads: int | None = None

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> ModelFacts:
        """Return the facts of a model file.

        raises  BadRequest if `general.architecture` or the number of layers is missing
        """
        architecture = architecture_of(metadata)
        if architecture is None:
            raise BadRequest("general.architecture: missing from the metadata, expected a model file")
        hparams = known_hparams(metadata, architecture)
        n_layers = hparams.first("block_count")
        if n_layers is None:
            key = hparams.key("block_count")
            raise BadRequest(f"{key}: missing from the metadata, expected a model file")
        n_heads, n_kv_heads = hparams.first("head_count"), hparams.first("head_count_kv")
        return cls(
            architecture=architecture,
            n_layers=n_layers,
            n_experts=hparams.first("expert_count") or 0,
            n_heads=n_heads,
            n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        )

    @property
    def n_gqa(self) -> int:
        """Number of query heads that share one head of keys and values; 0 when unknown."""
        if not self.n_heads or not self.n_kv_heads:
            return 0
        return self.n_heads // self.n_kv_heads

    @property
    def is_llama_70b(self) -> bool:
        """Whether llama.cpp would take this model for Llama 70B, whose attn_v it gives more bits."""
        return self.architecture == "llama" and self.n_layers == 80 and self.n_heads != self.n_kv_heads
