"""ToyConfig: what config.json says about a toy model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.architectures.config_reader import MAX_LAYERS, ConfigReader

NAME = "ToyForCausalLM"


@dataclass(frozen=True)
class ToyConfig:
    """Sizes of one model; names as in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], path: str | Path = "config.json") -> ToyConfig:
        read = ConfigReader(raw, path)
        read.architecture((NAME,))
        read.fixed("hidden_act", "silu", "a toy has no other activation")
        return cls(
            vocab_size=read.size("vocab_size"),
            hidden_size=read.size("hidden_size"),
            intermediate_size=read.size("intermediate_size"),
            num_hidden_layers=read.size("num_hidden_layers", most=MAX_LAYERS),
            num_attention_heads=read.size("num_attention_heads"),
            num_key_value_heads=read.size("num_key_value_heads"),
            head_dim=read.size("head_dim"),
            max_position_embeddings=read.size("max_position_embeddings"),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        )

    @property
    def q_rows(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.num_key_value_heads * self.head_dim
