"""LFM2, dense and with experts: most layers are a short convolution between two gates, the others attention.

Facts of transformers' modeling_lfm2_moe.py and llama.cpp's converter (LFM2Model, LFM2MoeModel).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader, merged
from convert.architectures.decoder.config import (
    DecoderConfig,
    decoder_fields,
    expert_fields,
    fix_head_dim,
    layers_of_kind,
    refuse_one_kind,
    with_defaults,
)
from convert.architectures.decoder.family import decoder
from convert.architectures.decoder.metadata import (
    COMMON,
    DENSE_LAYERS,
    EXPERT_WIDTH,
    GATING,
    VOCAB_SIZE,
    changed,
    read_decoder,
)
from convert.architectures.decoder.rules import (
    attention,
    biased_router,
    dense_blocks,
    ends,
    expert_stacks,
    in_layer,
    layers,
    moe_layers,
    norm_of_blocks,
)
from convert.architectures.delta_net.arrange import squeezed
from convert.architectures.delta_net.family import float32_kernels
from convert.architectures.rules import Output, Rule
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value

_CONV = "conv"
"""Value of layer_types."""


@dataclass(frozen=True)
class ShortConvConfig(DecoderConfig):
    """Configuration of a model; names as in config.json.

    conv_layers   layers that are a short convolution
    conv_L_cache  tokens that it sees, the token's own with them
    """

    conv_layers: tuple[int, ...] = ()
    conv_L_cache: int = 3  # noqa: N815

    @property
    def in_rows(self) -> int:
        """Rows of in_proj: a gate before the convolution, one behind it, and what is convolved."""
        return 3 * self.hidden_size


def _read(raw: Mapping[str, Any], path: str | Path) -> ShortConvConfig:
    """Return the configuration of an LFM2, with experts or without."""
    stated = {key: raw.get(other) for key, other in _OTHER_NAMES.items() if raw.get(other) is not None}
    read = with_defaults(merged(raw, stated), path)
    read.fixed("conv_bias", False, "llama.cpp's lfm2 has no such biases")
    fields = decoder_fields(read, theta=1e6, eps="norm_eps")
    fix_head_dim(read, fields, "lfm2")
    n_layers = fields["num_hidden_layers"]
    attending = read.raw.get("full_attn_idxs")
    if attending is not None and not isinstance(attending, list):
        raise read.bad("full_attn_idxs", "a list of layers")
    conv = layers_of_kind(
        read, n_layers, lambda layer: attending is not None and layer not in attending, _CONV
    )
    counts = {"convolution": len(conv), "attention": n_layers - len(conv)}
    refuse_one_kind(read, "layer_types", counts)
    if raw["architectures"][0].startswith("Lfm2Moe"):
        fields |= _experts(read)
    else:
        fields["intermediate_size"] = _width(read)
    return ShortConvConfig(
        **fields, qk_norm=True, conv_layers=conv, conv_L_cache=read.size("conv_L_cache", 3, least=2)
    )


_OTHER_NAMES = {
    "intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding",
    "num_attention_heads": "num_heads",
}  # fmt: skip
"""Field of transformers' class -> what the first published models call it, too, and which counts."""


def _width(read: ConfigReader) -> int:
    """Return the width of dense blocks, which may be less than config.json states."""
    width = read.size("intermediate_size")
    multiplier, step = read.raw.get("block_ffn_dim_multiplier", 1.0), read.size("block_multiple_of", 256)
    if not read.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if multiplier is None:
        return width
    width = int(read.number("block_ffn_dim_multiplier") * width)
    return -(-width // step) * step


def _experts(read: ConfigReader) -> dict[str, Any]:
    why = "llama.cpp's lfm2moe has no other"
    for key, value in (("use_expert_bias", True), ("norm_topk_prob", True), ("routed_scaling_factor", 1.0)):
        read.fixed(key, value, why)
    return {
        **expert_fields(read),
        "moe_intermediate_size": read.size("moe_intermediate_size"),
        "first_k_dense_replace": read.size("num_dense_layers", 2, least=0),
        "scoring_func": "sigmoid",
    }


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> ShortConvConfig:
    """Read the configuration out of the keys and tensors of a GGUF file; see `read_decoder`."""
    hparams = read_hparams(metadata, family.gguf_name, path)
    if hparams.sliding_window:
        raise UnsupportedCheckpoint(
            f"{path}: {hparams.key('sliding_window')} is {hparams.sliding_window}, expected none: the forward"
            f" pass has no windows for {family.gguf_name}"
        )
    plain = read_decoder(family, metadata, shapes, path, by_layer=("head_count_kv",))
    kv_heads = hparams.by_layer("head_count_kv", plain.num_hidden_layers)
    return ShortConvConfig(
        **{**vars(plain), "qk_norm": True},
        conv_layers=tuple(layer for layer, count in enumerate(kv_heads) if not count),
        conv_L_cache=hparams.size("shortconv_l_cache"),
    )


def _attending(config: ShortConvConfig, options: Any) -> list[int]:
    return [layer for layer in range(config.num_hidden_layers) if layer not in config.conv_layers]


def _convolving(config: ShortConvConfig, options: Any) -> tuple[int, ...]:
    return config.conv_layers


_NAMES = (
    (re.compile(r"(^|\.)embedding_norm\."), r"\1norm."),
    (re.compile(r"\.operator_norm\."), ".input_layernorm."),
    (re.compile(r"\.ffn_norm\."), ".post_attention_layernorm."),
    (re.compile(r"\.self_attn\.out_proj\."), ".self_attn.o_proj."),
    (re.compile(r"\.self_attn\.([qk])_layernorm\."), r".self_attn.\1_norm."),
    (re.compile(r"\.feed_forward\."), ".mlp."),
    (re.compile(r"\.mlp\.expert_bias$"), ".mlp.gate.e_score_correction_bias"),
    (re.compile(r"(\.mlp\.(?:.*\.)?)w1\."), r"\1gate_proj."),
    (re.compile(r"(\.mlp\.(?:.*\.)?)w2\."), r"\1down_proj."),
    (re.compile(r"(\.mlp\.(?:.*\.)?)w3\."), r"\1up_proj."),
)
"""Names of LFM2 -> those that most families have."""


def _usual_name(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = pattern.sub(replacement, name)
    return name


def _end(rule: Rule) -> Rule:
    """Return a rule of `ends` with the name that llama.cpp has for LFM2's norm before the output matrix."""
    (output,) = rule.outputs
    name = output.name.replace("output_norm", "token_embd_norm")
    return Rule(rule.where, (Output(name, output.source, output.sizes),), optional=rule.optional)


_RULES: tuple[Rule, ...] = (
    *map(_end, ends()),
    *attention(where=_attending),
    in_layer(_convolving, "shortconv.conv.weight", "conv.conv.weight", "hidden_size one conv_L_cache",
             squeezed),
    in_layer(_convolving, "shortconv.in_proj.weight", "conv.in_proj.weight", "in_rows hidden_size"),
    in_layer(_convolving, "shortconv.out_proj.weight", "conv.out_proj.weight", "hidden_size hidden_size"),
    norm_of_blocks(),
    *dense_blocks(),
)  # fmt: skip
_L_CACHE = Key(keys.SHORTCONV_L_CACHE, Value.u32, lambda c, o: c.conv_L_cache)
_COMMON: tuple[Key, ...] = changed(
    COMMON,
    Key(
        keys.HEAD_COUNT_KV,
        Value.i32s,
        lambda c, o: [0 if layer in c.conv_layers else c.num_key_value_heads for layer in layers(c, o)],
    ),
)

_LFM2 = decoder(
    "Lfm2ForCausalLM",
    gguf_name="lfm2",
    read_config=_read,
    rules=_RULES,
    metadata=(*_COMMON, VOCAB_SIZE, _L_CACHE),
    canonical_name=_usual_name,
    forced_type=float32_kernels,
    reader=_read_file,
)

_LFM2MOE = decoder(
    "Lfm2MoeForCausalLM",
    gguf_name="lfm2moe",
    read_config=_read,
    rules=(
        *_RULES,
        *biased_router(),
        *expert_stacks(moe_layers, order="gate down up"),
    ),
    metadata=(
        *(key for key in _COMMON if key is not GATING), EXPERT_WIDTH, DENSE_LAYERS, GATING, VOCAB_SIZE,
        _L_CACHE,
    ),
    canonical_name=_usual_name,
    forced_type=float32_kernels,
    reader=_read_file,
)  # fmt: skip

FAMILIES = (_LFM2, _LFM2MOE)
