"""The keys of models with gated delta nets, and their configuration read back from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from convert.architectures.base import Key
from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.decoder.metadata import (
    COMMON,
    EXPERT_WIDTH,
    ROTATED_COLS,
    ROTATION,
    read_decoder,
)
from convert.architectures.decoder.rules import layers, n_mtp_layers
from convert.architectures.delta_net.config import DeltaNetConfig
from gguf_tools.errors import FormatError
from gguf_tools.format import keys
from gguf_tools.format.hparams import HParams, read_hparams
from gguf_tools.format.values import Metadata, Value

_u32 = Value.u32


def _sections(stated: bool) -> Key:
    """Return the key of MRoPE's sections, padded to four; `stated`: for a config.json that has them."""
    return Key(
        keys.ROPE_DIMENSION_SECTIONS,
        Value.i32s,
        lambda c, o: (
            (*c.mrope_section, 0, 0, 0, 0)[:4] if c.mrope_section and c.states_section == stated else None
        ),
    )


_AT_ROTATION = COMMON.index(ROTATION[0])

METADATA: tuple[Key, ...] = (
    *COMMON[:_AT_ROTATION],
    _sections(True),
    *COMMON[_AT_ROTATION:],
    EXPERT_WIDTH,
    Key(keys.EXPERT_SHARED_FEED_FORWARD_LENGTH, _u32, lambda c, o: c.shared_intermediate_size or None),
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
    architecture: str, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DeltaNetConfig:
    """Read the configuration out of the keys and tensors of a GGUF file; see `read_decoder`."""
    decoder = read_decoder(architecture, metadata, shapes, path)
    hparams = read_hparams(metadata, architecture, path)
    n_key_heads, n_value_heads = hparams.size("ssm_group_count"), hparams.size("ssm_time_step_rank")
    inner = hparams.size("ssm_inner_size")
    if not n_key_heads or not n_value_heads or n_value_heads % n_key_heads or inner % n_value_heads:
        raise FormatError(
            f"{path}: {n_key_heads} heads of keys and {n_value_heads} of values, {inner} columns in all:"
            f" expected delta nets of {architecture}"
        )
    return DeltaNetConfig(
        **{field.name: getattr(decoder, field.name) for field in fields(DecoderConfig)},
        linear_layers=_linear_layers(hparams, decoder.num_hidden_layers),
        full_attention_interval=hparams.size("full_attention_interval", 4),
        linear_num_key_heads=n_key_heads,
        linear_num_value_heads=n_value_heads,
        linear_key_head_dim=hparams.size("ssm_state_size"),
        linear_value_head_dim=inner // n_value_heads,
        linear_conv_kernel_dim=hparams.size("ssm_conv_kernel"),
    )


def _linear_layers(hparams: HParams, n_layers: int) -> tuple[int, ...]:
    flags = hparams.flags("recurrent_layers", n_layers)
    if flags is None:
        interval = hparams.size("full_attention_interval", 4) or 1
        flags = tuple(bool((layer + 1) % interval) for layer in range(n_layers))
    return tuple(layer for layer, is_linear in enumerate(flags[:n_layers]) if is_linear)
