"""DeltaNetConfig: what config.json says of a model with gated delta nets, and the keys of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.config import (
    FULL,
    DecoderConfig,
    decoder_fields,
    expert_fields,
    layers_of_kind,
    refuse_one_kind,
    with_defaults,
)
from convert.architectures.decoder.metadata import (
    COMMON,
    EXPERT_WIDTH,
    MROPE_SECTIONS,
    ROTATED_COLS,
    SHARED_WIDTH,
    inserted,
    read_decoder,
)
from convert.architectures.decoder.rules import layers, n_mtp_layers
from gguf_tools.errors import FormatError
from gguf_tools.format import keys
from gguf_tools.format.hparams import HParams, read_hparams
from gguf_tools.format.values import Metadata, Value

LINEAR = "linear_attention"
"""Value of layer_types, for a delta net."""

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
    states_section          whether config.json has the mrope_section
    """

    linear_layers: tuple[int, ...] = ()
    full_attention_interval: int = 4
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    states_section: bool = False

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
    linear = layers_of_kind(read, n_layers, lambda layer: (layer + 1) % interval > 0, LINEAR)
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


# ---- the keys, written and read back

_u32 = Value.u32


def _sections(stated: bool) -> Key:
    """Return the key of M-RoPE's sections; `stated`: for a config.json that has them."""
    value = MROPE_SECTIONS.value
    return replace(MROPE_SECTIONS, value=lambda c, o: value(c, o) if c.states_section == stated else None)


METADATA: tuple[Key, ...] = (
    *inserted(COMMON, _sections(True), after=keys.HEAD_COUNT_KV),
    EXPERT_WIDTH,
    SHARED_WIDTH,
    Key(keys.NEXTN_PREDICT_LAYERS, _u32, lambda c, o: n_mtp_layers(c, o) or None),
    Key(keys.SSM_CONV_KERNEL, _u32, lambda c, o: c.linear_conv_kernel_dim),
    Key(keys.SSM_STATE_SIZE, _u32, lambda c, o: c.linear_key_head_dim),
    Key(keys.SSM_GROUP_COUNT, _u32, lambda c, o: c.linear_num_key_heads),
    Key(keys.SSM_TIME_STEP_RANK, _u32, lambda c, o: c.linear_num_value_heads),
    Key(keys.SSM_INNER_SIZE, _u32, lambda c, o: c.value_rows),
    Key(keys.RECURRENT_LAYERS, Value.bools, lambda c, o: [n in c.linear_layers for n in layers(c, o)]),
    Key(keys.FULL_ATTENTION_INTERVAL, _u32, lambda c, o: c.full_attention_interval),
    ROTATED_COLS,
    _sections(False),
)


def read_delta_net_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DeltaNetConfig:
    """Read the configuration out of the keys and tensors of a GGUF file; see `read_decoder`."""
    decoder = read_decoder(family, metadata, shapes, path)
    hparams = read_hparams(metadata, family.gguf_name, path)
    n_key_heads, n_value_heads = hparams.size("ssm_group_count"), hparams.size("ssm_time_step_rank")
    inner = hparams.size("ssm_inner_size")
    if not n_key_heads or not n_value_heads or n_value_heads % n_key_heads or inner % n_value_heads:
        raise FormatError(
            f"{path}: {n_key_heads} heads of keys and {n_value_heads} of values, {inner} columns in all:"
            f" expected delta nets of {family.gguf_name}"
        )
    return DeltaNetConfig(
        **vars(decoder),
        linear_layers=_flagged_layers(hparams, decoder.num_hidden_layers),
        full_attention_interval=hparams.size("full_attention_interval", 4),
        linear_num_key_heads=n_key_heads,
        linear_num_value_heads=n_value_heads,
        linear_key_head_dim=hparams.size("ssm_state_size"),
        linear_value_head_dim=inner // n_value_heads,
        linear_conv_kernel_dim=hparams.size("ssm_conv_kernel"),
    )


def _flagged_layers(hparams: HParams, n_layers: int) -> tuple[int, ...]:
    """Return the numbers of the layers that are delta nets in a file."""
    flags = hparams.flags("recurrent_layers", n_layers)
    if flags is None:
        interval = hparams.size("full_attention_interval", 4) or 1
        flags = tuple(bool((layer + 1) % interval) for layer in range(n_layers))
    return tuple(layer for layer, is_linear in enumerate(flags[:n_layers]) if is_linear)
