"""Qwen 3.5 and its successors: delta nets with tiled heads of values; dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.rules import in_layer
from convert.architectures.delta_net.arrange import tiled_behind_keys, tiled_columns, tiled_values
from convert.architectures.delta_net.config import MROPE_SECTION, DeltaNetConfig, read_delta_net
from convert.architectures.delta_net.family import family
from convert.architectures.delta_net.rules import delta_net, linear_layers


def read_config(raw: Mapping[str, Any], path: str | Path) -> DeltaNetConfig:
    """Return the configuration of a Qwen 3.5, with experts or without."""
    config = read_delta_net(raw, path)
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    section = rope.get("mrope_section")
    if section is None:
        section, states = list(MROPE_SECTION), False
    elif isinstance(section, list) and 0 < len(section) <= 4 and all(n in range(2**15) for n in section):
        states = True
    else:
        inside = ConfigReader(rope, path, prefix="rope_parameters.")
        raise inside.bad("mrope_section", "up to four whole numbers")
    if sum(section) > config.head_dim:
        raise ConfigReader(raw, path).bad("head_dim", f"{sum(section)} at least, the sum of mrope_section")
    return replace(config, mrope_section=tuple(section), states_section=states)


DELTA_NETS = (
    in_layer(linear_layers, "attn_qkv.weight", "linear_attn.in_proj_qkv.weight",
             "convolved_rows hidden_size", tiled_behind_keys),
    in_layer(linear_layers, "attn_gate.weight", "linear_attn.in_proj_z.weight", "value_rows hidden_size",
             tiled_values),
    in_layer(linear_layers, "ssm_beta.weight", "linear_attn.in_proj_b.weight",
             "linear_num_value_heads hidden_size", tiled_values),
    in_layer(linear_layers, "ssm_alpha.weight", "linear_attn.in_proj_a.weight",
             "linear_num_value_heads hidden_size", tiled_values),
    *delta_net(tiled_behind_keys, tiled_values, tiled_columns),
)  # fmt: skip


ARCHITECTURE = family(
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    gguf_name="qwen35",
    read_config=read_config,
    delta_nets=DELTA_NETS,
)
