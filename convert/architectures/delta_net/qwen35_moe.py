"""Qwen 3.5 and its successors with routed experts and a shared one, which has a gate of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.architectures.delta_net.config import DeltaNetConfig
from convert.architectures.delta_net.family import family
from convert.architectures.delta_net.qwen35 import DELTA_NETS, canonical_name, read_qwen35

_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32768, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "intermediate_size": 0,
}  # fmt: skip


def read_config(raw: Mapping[str, Any], path: str | Path) -> DeltaNetConfig:
    """Return the configuration of a Qwen 3.5 with experts."""
    return read_qwen35(raw, path, _DEFAULTS)


ARCHITECTURE = family(
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    gguf_name="qwen35moe",
    read_config=read_config,
    delta_nets=DELTA_NETS,
    canonical_name=canonical_name,
)
