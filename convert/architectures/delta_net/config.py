"""DeltaNetConfig: what config.json says of a model with gated delta nets, checked and complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.architectures.config_reader import MAX_LAYERS, ConfigReader
from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    expert_fields,
    refuse_one_kind,
    with_defaults,
)

LINEAR, FULL = "linear_attention", "full_attention"
"""Values of layer_types."""

MROPE_SECTION = (11, 11, 10)
"""mrope_section where config.json has none, as transformers' rotary embedding has it."""


@dataclass(frozen=True)
class DeltaNetConfig(DecoderConfig):
    """Configuration of a model; names as in config.json.

    linear_layers           layers that are delta nets; the others are attention with a gate
    full_attention_interval one layer in so many is attention, if layer_types says nothing
    linear_num_key_heads    heads of queries and keys of a delta net
    linear_num_value_heads  heads of its values, states and gates
    linear_conv_kernel_dim  tokens that its convolution sees
    mrope_section           pairs of columns that time, height and width rotate; None for plain RoPE
    states_section          whether config.json says so
    """

    linear_layers: tuple[int, ...] = ()
    full_attention_interval: int = 4
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    mrope_section: tuple[int, ...] | None = None
    states_section: bool = False

    @property
    def one(self) -> int:
        """The length of a dimension that some weights have besides theirs."""
        return 1

    @property
    def key_rows(self) -> int:
        """Rows of a delta net's queries, and of its keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_rows(self) -> int:
        """Rows of a delta net's values, and of its gate."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def convolved_rows(self) -> int:
        """Rows of a delta net's queries, keys and values, which go through the convolution together."""
        return 2 * self.key_rows + self.value_rows

    @property
    def all_rows(self) -> int:
        """The same with the gate."""
        return self.convolved_rows + self.value_rows

    @property
    def scalar_rows(self) -> int:
        """Rows of the two numbers that every head of values has for a token."""
        return 2 * self.linear_num_value_heads

    @property
    def gated_q_rows(self) -> int:
        """Rows of q_proj of attention: every head's query, and its gate behind it."""
        return 2 * self.q_rows


def read_delta_net(raw: Mapping[str, Any], path: str | Path) -> DeltaNetConfig:
    """Read a configuration.

    raises  BadConfig, UnsupportedCheckpoint, naming file and key
    """
    read = with_defaults(raw, path)
    read.fixed("attention_bias", False, "llama.cpp reads no biases of this architecture")
    read.fixed("attn_output_gate", True, "llama.cpp always gates the attention of this architecture")
    fields = decoder_fields(read)
    key_heads, value_heads = read.size("linear_num_key_heads", 16), read.size("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise read.bad("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    key_dim = read.size("linear_key_head_dim", 128)
    why = "llama.cpp has keys and values of one size, here linear_key_head_dim"
    read.fixed("linear_value_head_dim", key_dim, why)
    interval, n_layers = read.size("full_attention_interval", 4), fields["num_hidden_layers"]
    linear = _linear_layers(read, n_layers, interval)
    refuse_one_kind(read, "layer_types", {LINEAR: len(linear), FULL: n_layers - len(linear)})
    return DeltaNetConfig(
        **fields,
        qk_norm=True,
        linear_layers=linear,
        full_attention_interval=interval,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=key_dim,
        linear_conv_kernel_dim=read.size("linear_conv_kernel_dim", 4),
        num_nextn_predict_layers=read.size("mtp_num_hidden_layers", 1, least=0, most=1),
        **_experts(read),
    )


def _experts(read: ConfigReader) -> dict[str, Any]:
    if read.raw.get("num_experts") is None:
        return {}
    return {
        **expert_fields(read),
        "moe_intermediate_size": read.size("moe_intermediate_size"),
        "shared_expert_intermediate_size": read.size("shared_expert_intermediate_size"),
    }


def _linear_layers(read: ConfigReader, n_layers: int, interval: int) -> tuple[int, ...]:
    """Return the numbers of the layers that are delta nets."""
    kinds = read.raw.get("layer_types")
    if kinds is None:
        return tuple(layer for layer in range(min(n_layers, MAX_LAYERS)) if (layer + 1) % interval)
    if not isinstance(kinds, list) or len(kinds) != n_layers or not set(map(str, kinds)) <= {LINEAR, FULL}:
        raise read.bad("layer_types", f"{LINEAR!r} or {FULL!r} for each of the {n_layers} layers")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
