"""Qwen3-Next: delta nets whose projections stand together, by heads of keys; experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.rules import in_layer
from convert.architectures.delta_net.arrange import run_of_key_heads, squeezed
from convert.architectures.delta_net.config import DeltaNetConfig, read_delta_net
from convert.architectures.delta_net.family import family
from convert.architectures.delta_net.rules import delta_net, linear_layers
from convert.architectures.rules import Output, Rule

_QKVZ = "model.layers.{layer}.linear_attn.in_proj_qkvz.weight"


def read_config(raw: Mapping[str, Any], path: str | Path) -> DeltaNetConfig:
    """Return the configuration of a Qwen3-Next."""
    read = ConfigReader(raw, path)
    why = "llama.cpp's qwen3next has experts in every layer, whose weights it normalises"
    read.fixed("decoder_sparse_step", 1, why)
    read.fixed("mlp_only_layers", [], why)
    read.fixed("norm_topk_prob", True, why)
    return read_delta_net(raw, path)


ARCHITECTURE = family(
    "Qwen3NextForCausalLM",
    gguf_name="qwen3next",
    read_config=read_config,
    delta_nets=(
        Rule(linear_layers, (
            Output("blk.{layer}.attn_qkv.weight", _QKVZ, "all_rows hidden_size", run_of_key_heads(True)),
            Output("blk.{layer}.attn_gate.weight", _QKVZ, "all_rows hidden_size", run_of_key_heads(False)),
        )),
        in_layer(linear_layers, "ssm_ba.weight", "linear_attn.in_proj_ba.weight", "scalar_rows hidden_size"),
        *delta_net(squeezed),
    ),
)  # fmt: skip
