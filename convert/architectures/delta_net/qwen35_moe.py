"""Qwen 3.5 and its successors with routed experts and a shared one, which has a gate of its own."""

from __future__ import annotations

from convert.architectures.delta_net.family import family
from convert.architectures.delta_net.qwen35 import DELTA_NETS, read_config

ARCHITECTURE = family(
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    gguf_name="qwen35moe",
    read_config=read_config,
    delta_nets=DELTA_NETS,
)
