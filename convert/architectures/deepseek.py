"""DeepSeek MoE: a decoder whose rotated rows change places, with shared and routed experts.

Where this differs from llama.cpp's converter: rope.scaling.type says "linear" for a model stretched so,
where that one writes "none" in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.architectures.base import Key
from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.config import DecoderConfig, decoder_fields, expert_fields, fix_head_dim
from convert.architectures.decoder.family import decoder, decoder_notes
from convert.architectures.decoder.metadata import (
    COMMON,
    DENSE_LAYERS,
    EXPERT_SCALE,
    EXPERT_WIDTH,
    ROTATED_COLS,
    SHARED_EXPERTS,
    VOCAB_SIZE,
)
from convert.architectures.decoder.rope import paired
from convert.architectures.decoder.rules import (
    attention,
    dense_blocks,
    ends,
    expert_stacks,
    in_layer,
    layers,
    moe_layers,
    shared_experts,
)
from convert.architectures.options import NoOptions
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.values import Value
from gguf_tools.text import quoted

NAME = "DeepseekForCausalLM"
_SCALINGS = ("default", "linear", "dynamic")
"""Kinds of RoPE that the model's own code has."""


def read_config(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a DeepSeek MoE."""
    read = ConfigReader(raw, path)
    read.fixed("attention_bias", False, "llama.cpp's deepseek has no attention biases")
    read.fixed("moe_layer_freq", 1, "every layer after the leading dense ones is a mixture of experts")
    fields = decoder_fields(read)
    fix_head_dim(read, fields, "deepseek")
    if fields["rope"].kind not in _SCALINGS:
        raise UnsupportedCheckpoint(
            f"{path}: RoPE of type {quoted(fields['rope'].kind)}, expected one of {', '.join(_SCALINGS)}"
        )
    stated = raw.get("scoring_func") is not None
    return DecoderConfig(
        **fields,
        **expert_fields(read),
        moe_intermediate_size=read.size("moe_intermediate_size"),
        num_shared_experts=read.size("n_shared_experts"),
        first_k_dense_replace=read.size("first_k_dense_replace", 0, least=0),
        scoring_func=read.choice("scoring_func", ("softmax",)) if stated else None,
        norm_topk_prob=read.flag("norm_topk_prob", False),
    )


def _notes(config: DecoderConfig, options: NoOptions) -> tuple[str, ...]:
    notes = list(decoder_notes(config))
    if config.norm_topk_prob:
        notes.append("norm_topk_prob is true: llama.cpp's deepseek doesn't normalise the weights of experts")
    if config.rope.kind == "linear":
        notes.append("rope.scaling.type is written as linear, where llama.cpp's converter writes none")
    return tuple(notes)


def _scaling(config: DecoderConfig, options: NoOptions) -> str | None:
    return None if config.rope.kind == "linear" else "none"


ARCHITECTURE = decoder(
    NAME,
    gguf_name="deepseek",
    read_config=read_config,
    rules=(
        *ends(),
        *attention(paired),
        in_layer(layers, "ffn_norm.weight", "post_attention_layernorm.weight", "hidden_size"),
        *dense_blocks(),
        in_layer(moe_layers, "ffn_gate_inp.weight", "mlp.gate.weight", "num_experts hidden_size"),
        *expert_stacks(moe_layers),
        *shared_experts(moe_layers),
    ),
    metadata=(*COMMON, ROTATED_COLS, Key(keys.ROPE_SCALING_TYPE, Value.string, _scaling), DENSE_LAYERS,
              VOCAB_SIZE, EXPERT_WIDTH, EXPERT_SCALE, SHARED_EXPERTS),
    notes=_notes,
)  # fmt: skip
