"""Llama 4: experts in every layer or in every second one, and a shared one that is as wide.

Of four layers, three see chunks of positions, and norm what they have rotated. The fourth sees all, rotates
nothing, and its scores grow with the position. Experts multiply the input times their weight. Stacks of
experts are stored with rows as columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import MAX_LAYERS, ConfigReader
from convert.architectures.decoder.config import (
    FULL,
    DecoderConfig,
    decoder_fields,
    expert_fields,
    with_defaults,
)
from convert.architectures.decoder.family import LLAMA3, decoder, decoder_notes
from convert.architectures.decoder.metadata import (
    COMMON,
    EXPERT_WIDTH,
    ROTATED_COLS,
    VOCAB_SIZE,
    read_decoder,
    read_theta,
    sliding_layers,
)
from convert.architectures.decoder.rope import LLAMA3_ROTATION
from convert.architectures.decoder.rules import (
    attention,
    dense_blocks,
    ends,
    in_layer,
    norm_of_blocks,
    shared_experts,
)
from convert.architectures.gemma.gemma3 import vision_drops
from convert.architectures.options import NoOptions
from convert.architectures.qwen_vl import turned_stacks
from convert.tokenizer.files import Quirks
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value

_WHY = "llama.cpp's llama4 has no other"
_CHUNK, _PERIOD = 8192, 4
"""Positions of a chunk, and one layer in so many that sees all: numbers in llama.cpp's code."""

_SHARPNESS = 0.1
"""How much scores grow with the logarithm of the number of chunks, in layers that see all: the same."""

_N_UNNORMED = 128
"""The number of experts by which llama.cpp knows the model without norms of queries and keys."""


@dataclass(frozen=True)
class Llama4Config(DecoderConfig):
    """Configuration of a model.

    sharpens  whether the original's scores grow with the position in layers that don't rotate
    """

    sharpens: bool = True


def read_config(raw: Mapping[str, Any], path: str | Path) -> Llama4Config:
    """Return the configuration of a Llama 4."""
    read = with_defaults(raw, path)
    fields = {**decoder_fields(read, theta=5e5), **expert_fields(read)}
    if fields["rotated_cols"] != fields["head_dim"]:
        raise UnsupportedCheckpoint(
            f"{path}: partial_rotary_factor of rope_parameters, or rope_scaling, is {fields['rope'].partial},"
            f" expected 1: {_WHY}"
        )
    n_layers, n_experts, step = fields["num_hidden_layers"], fields["num_experts"], _moe_step(read)
    every = range(min(n_layers, MAX_LAYERS))
    rotated = [int((layer + 1) % _PERIOD != 0) for layer in every]
    if not read.raw.get("no_rope_layers"):
        read.fixed("no_rope_layer_interval", _PERIOD, _WHY)
    read.overruled("no_rope_layer_interval")
    for key, value in (
        ("attention_bias", False), ("attention_chunk_size", _CHUNK), ("floor_scale", _CHUNK),
        ("attn_scale", _SHARPNESS), ("use_qk_norm", n_experts != _N_UNNORMED),
        ("no_rope_layers", rotated or None),
        ("layer_types", ["chunked_attention" if turns else FULL for turns in rotated]),
        ("moe_layers", [layer for layer in every if (layer + 1) % step == 0]),
    ):  # fmt: skip
        read.fixed(key, value, _WHY)
    if read.raw.get("attention_chunk_size") is None:
        raise read.bad("attention_chunk_size", f"{_CHUNK}: {_WHY}")
    return Llama4Config(
        **{**fields, "intermediate_size": read.size("intermediate_size_mlp")},
        moe_intermediate_size=fields["intermediate_size"],
        num_shared_experts=1,
        moe_step=step,
        sharpens=bool(read.raw.get("attn_temperature_tuning")),
    )


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> Llama4Config:
    """Return the configuration in a file, see `read_decoder`, with what llama.cpp's code says."""
    plain, hparams = (
        read_decoder(family, metadata, shapes, path),
        read_hparams(metadata, family.gguf_name, path),
    )
    n_layers, rope, step = plain.num_hidden_layers, plain.rope, hparams.size("interleave_moe_layer_step")
    if hparams.first("sliding_window") == 0 or not plain.num_experts or not step:
        raise UnsupportedCheckpoint(
            f"{path}: a sliding_window of {hparams.sliding_window}, and {plain.num_experts} experts in one"
            f" layer of {step}, expected chunks and experts"
        )
    local_theta = read_theta(hparams, "rope_freq_base_swa", rope.theta)
    if local_theta != rope.theta or (rope.kind == "none" and rope.factor != 1.0):
        raise UnsupportedCheckpoint(
            f"{path}: a rope.freq_base_swa of {local_theta:g}, and a factor of {rope.factor:g} for RoPE of"
            f" type {rope.kind}, expected one rotation for all layers"
        )
    own = {
        "sliding_window": _CHUNK,
        "sliding_chunks": True,
        "sliding_layers": sliding_layers(hparams, n_layers, _PERIOD),
        "unrotated_layers": tuple(range(_PERIOD - 1, n_layers, _PERIOD)),
        "unit_qk": plain.num_experts != _N_UNNORMED,
        "sharpness": (_SHARPNESS, _CHUNK),
        "sharpness_offset": 1,
        "num_shared_experts": 1,
        "moe_step": step,
        "weighs_inputs": True,
        "norm_topk_prob": False,
        "scoring_func": "sigmoid",
    }
    return Llama4Config(**{**vars(plain), **own})


def _moe_step(read: ConfigReader) -> int:
    """Return the number of layers to one with experts; moe_layers counts where both are there."""
    stated = read.raw.get("moe_layers")
    read.overruled("interleave_moe_layer_step")
    if isinstance(stated, list) and stated and type(stated[0]) is int and stated[0] >= 0:
        return stated[0] + 1
    return read.size("interleave_moe_layer_step")


def _notes(config: Llama4Config, options: NoOptions) -> tuple[str, ...]:
    notes = decoder_notes(config, frozenset({LLAMA3}))
    if config.sharpens:
        return notes
    return (
        *notes,
        f"attn_temperature_tuning is false: from position {_CHUNK} on, llama.cpp's llama4 sharpens attention"
        " all the same",
    )


def _with_experts(config: Llama4Config, options: NoOptions) -> Iterator[int]:
    return (layer for layer in range(config.num_hidden_layers) if (layer + 1) % config.moe_step == 0)


def _dense(config: Llama4Config, options: NoOptions) -> Iterator[int]:
    return (layer for layer in range(config.num_hidden_layers) if (layer + 1) % config.moe_step)


_LLAMA4 = decoder(
    "Llama4ForConditionalGeneration",
    "Llama4ForCausalLM",
    gguf_name="llama4",
    read_config=read_config,
    rules=(
        LLAMA3_ROTATION,
        *ends(),
        *attention(),
        norm_of_blocks(),
        *dense_blocks(where=_dense),
        in_layer(_with_experts, "ffn_gate_inp.weight", "mlp.router.weight", "num_experts hidden_size"),
        *turned_stacks(_with_experts),
        *shared_experts(_with_experts, "shared_expert"),
    ),
    metadata=(
        *COMMON, VOCAB_SIZE, ROTATED_COLS,
        Key(keys.INTERLEAVE_MOE_LAYER_STEP, Value.u32, lambda c, o: c.moe_step),
        EXPERT_WIDTH,
    ),
    drops=vision_drops,
    notes=_notes,
    quirks=Quirks(pre_tokenizers={"gpt-4o": "llama4"}),
    canonical_name=lambda name: name.replace(".feed_forward.", ".mlp."),
    reader=_read_file,
    rotation="pairs",
    norms_rotated=True,
    windows="alike",
)  # fmt: skip

FAMILIES = (_LLAMA4,)
