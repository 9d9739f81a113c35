"""Ernie 4.5, dense and with experts: neighbouring columns are rotated, in checkpoints as in files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader, merged
from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    expert_fields,
    stated_as,
    with_defaults,
)
from convert.architectures.decoder.family import decoder
from convert.architectures.decoder.metadata import (
    COMMON,
    DENSE_LAYERS,
    EXPERT_WIDTH,
    EXPERTS,
    SHARED_EXPERTS,
    SHARED_WIDTH,
    USED_EXPERTS,
    read_decoder,
    refuse_sections,
)
from convert.architectures.decoder.rules import (
    INV_FREQ,
    dense_decoder,
    expert_stacks,
    in_layer,
    moe_layers,
    shared_experts,
)
from convert.architectures.rules import Drop
from convert.tokenizer.files import Quirks
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value

_QUIRKS = Quirks(sentencepiece=True, states_prefix="last")

_THETA = 500000.0
"""Base of the rotation where config.json has none, as in transformers' classes."""


def _fields(read: ConfigReader) -> dict[str, Any]:
    """Return the fields of DecoderConfig that both kinds have."""
    read.fixed("use_bias", False, "llama.cpp's ernie4_5 adds none behind attention")
    return decoder_fields(read, theta=_THETA)


def _read_dense(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of a dense Ernie 4.5."""
    return DecoderConfig(**_fields(with_defaults(raw, path, name="Ernie4_5ForCausalLM")))


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Return the configuration in a file, see `read_decoder`, of a model of text."""
    refuse_sections(read_hparams(metadata, family.gguf_name, path))
    return read_decoder(family, metadata, shapes, path)


_DENSE = decoder(
    "Ernie4_5ForCausalLM",
    "Ernie4_5_ForCausalLM",
    gguf_name="ernie4_5",
    read_config=_read_dense,
    rules=dense_decoder(),
    rotation="pairs",
    quirks=_QUIRKS,
    reader=_read_file,
)


def _read_mixture(raw: Mapping[str, Any], path: str | Path) -> DecoderConfig:
    """Return the configuration of an Ernie 4.5 with experts."""
    read = with_defaults(raw, path)
    fields = _fields(read)
    read.fixed("moe_layer_interval", 1, "llama.cpp's ernie4_5-moe has experts in every layer but the first")
    last = fields["num_hidden_layers"] - 1
    if raw.get("moe_layer_end_index") != -1:
        read.fixed("moe_layer_end_index", last, "llama.cpp has experts up to the last of num_hidden_layers")
    counts = {
        "num_experts": read.size(stated_as(raw, path, "moe_num_experts", "num_experts", "num_local_experts")),
        "num_experts_per_tok": read.size(stated_as(raw, path, "moe_k", "num_experts_per_tok")),
    }
    return DecoderConfig(
        **fields,
        **expert_fields(ConfigReader(merged(read.raw, counts), path)),
        moe_intermediate_size=read.size("moe_intermediate_size"),
        num_shared_experts=read.size("moe_num_shared_experts", least=0),
        first_k_dense_replace=read.size("moe_layer_start_index", least=0),
    )


def _read_mixture_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Return the configuration in a file, see `read_decoder`, whose layers have experts from one on."""
    hparams = read_hparams(metadata, family.gguf_name, path)
    if hparams.interleave_moe_layer_step != 1:
        raise UnsupportedCheckpoint(
            f"{path}: {hparams.key('interleave_moe_layer_step')} is {hparams.interleave_moe_layer_step},"
            " expected 1: the forward pass has experts in every layer behind the dense ones"
        )
    return _read_file(family, metadata, shapes, path)


_MTP = Drop(lambda name: name.startswith("model.mtp_"), "multi-token prediction, which llama.cpp leaves out")

_MIXTURE = decoder(
    "Ernie4_5_MoeForCausalLM",
    gguf_name="ernie4_5-moe",
    read_config=_read_mixture,
    rules=(
        *dense_decoder(),
        in_layer(moe_layers, "ffn_gate_inp.weight", "mlp.gate.weight", "num_experts hidden_size"),
        in_layer(
            moe_layers, "exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias", "one num_experts"
        ),
        *expert_stacks(moe_layers, order="gate up down"),
        *shared_experts(moe_layers),
    ),
    metadata=(
        *(key for key in COMMON if key not in (EXPERTS, USED_EXPERTS)),
        EXPERTS, USED_EXPERTS, Key(keys.INTERLEAVE_MOE_LAYER_STEP, Value.u32, lambda c, o: 1), DENSE_LAYERS,
        EXPERT_WIDTH, SHARED_EXPERTS, SHARED_WIDTH,
    ),
    canonical_name=lambda name: name.replace(".mlp.gate.moe_statics.", ".mlp.moe_statics."),
    drops=lambda config, options: (INV_FREQ, _MTP),
    rotation="pairs",
    quirks=_QUIRKS,
    reader=_read_mixture_file,
)  # fmt: skip


FAMILIES = (_DENSE, _MIXTURE)
