"""GLM-5 Next, text part: layers of KDA, and of latent attention that rotates nothing and has indexers.

What it has besides Kimi Linear (facts of llama.cpp's converter, Glm5NextModel, and of transformers'
modeling_glm5_next.py):

    hc_*                   four streams of hidden states, mixed as in DeepSeek V4
    indexer.*              as in GLM-5, but it scores pools of index_kpool tokens
    indexer_compressor_*   the gate and the places by which the keys of a pool become one
    swiglu_clamp_*         one limit for all blocks and experts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader, merged
from convert.architectures.decoder.config import FULL, layers_of_kind, refuse_one_kind, with_defaults
from convert.architectures.decoder.metadata import (
    DENSE_LAYERS,
    EXPERT_NORM,
    EXPERT_SCALE,
    EXPERT_WIDTH,
    SHARED_EXPERTS,
    changed,
    inserted,
)
from convert.architectures.decoder.rules import (
    check_mtp,
    ends,
    expert_stacks,
    in_layer,
    keep_last_mtp,
    layers,
    moe_layers,
    mtp,
    mtp_drops,
    mtp_layers,
)
from convert.architectures.deepseek2.config import Defaults, deepseek_fields
from convert.architectures.deepseek2.deepseek32 import read_indexer_types
from convert.architectures.deepseek4 import read_limit
from convert.architectures.delta_net.config import LINEAR
from convert.architectures.delta_net.family import DROP_VISION, float32_kernels
from convert.architectures.kimi.linear import (
    COMMON_RULES,
    GROUPS,
    KimiConfig,
    check_linear_heads,
    in_two,
    kimi,
    kimi_delta,
    kimi_keys,
    latent_layers,
    read_bound,
    read_kimi_file,
    with_deepseek_names,
)
from convert.architectures.options import MTPOptions
from convert.architectures.rules import OutputTensor, Rule
from convert.tokenizer.files import GLM
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32, GGMLType
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value


@dataclass(frozen=True, kw_only=True)
class Glm5NextConfig(KimiConfig):
    """Configuration of a model; names as in config.json.

    states_theta   whether config.json has a rope_theta, which nothing is rotated by
    indexer_types  per layer whether it has an indexer of its own or uses the choice of a layer before it;
                   None: every layer of latent attention has one
    swiglu_limit   what gates may reach, and up from both sides; None for no limit
    """

    states_theta: bool
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    indexer_types: tuple[bool, ...] | None
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    swiglu_limit: float | None

    hc_scales: ClassVar[int] = 3

    @property
    def index_q_rows(self) -> int:
        return self.index_n_heads * self.index_head_dim

    @property
    def hc_cols(self) -> int:
        """Columns of all streams together."""
        return self.hc_mult * self.hidden_size

    @property
    def hc_rows(self) -> int:
        """Numbers by which streams are mixed before and after attention or a block."""
        return (2 + self.hc_mult) * self.hc_mult


# ---- config.json


def _read(raw: Mapping[str, Any], path: str | Path) -> Glm5NextConfig:
    kinds = raw.get("layer_types")
    if isinstance(kinds, list):
        kinds = [FULL if kind == "indexed_attention" else kind for kind in kinds]
    read = with_defaults(merged(with_deepseek_names(raw, path), {"layer_types": kinds}), path)
    for key, value in (("mla_use_nope", True), ("mhc", True), ("hc_mult", 4), ("qk_rope_head_dim", 0)):
        read.fixed(key, value, "llama.cpp's glm5-next has no other")
    why = "llama.cpp has no numbers for tokens before the first whole pool otherwise"
    read.fixed("index_kpool_always_select_tail", True, why)
    read.overruled("head_dim")  # qk_rope_head_dim says it
    defaults = dict.fromkeys(_GLM5_NEXT.hf_names, Defaults(groups=(1, 1), eps=1e-5))
    fields = deepseek_fields(read, defaults, rotates=False)
    if fields["q_lora_rank"] is None:
        raise read.bad("q_lora_rank", "a whole number: the indexer sees compressed queries")
    n_layers = fields["num_hidden_layers"]
    linear = layers_of_kind(read, n_layers, lambda layer: layer % 4 != 3, LINEAR)
    refuse_one_kind(read, "layer_types", {LINEAR: len(linear), FULL: n_layers - len(linear)})
    pool, chosen = read.size("index_kpool", least=2), read.size("index_topk")
    if chosen % pool:
        raise read.bad("index_topk", f"a multiple of index_kpool ({pool})")
    rope = read.raw.get("rope_parameters") or read.raw.get("rope_scaling") or {}
    return Glm5NextConfig(
        **fields | {"lengths_first": False},
        **_linear_fields(read, fields["num_attention_heads"]),
        linear_layers=linear,
        states_theta=(rope.get("rope_theta") or read.raw.get("rope_theta")) is not None,
        index_n_heads=read.size("index_n_heads"),
        index_head_dim=read.size("index_head_dim"),
        index_topk=chosen,
        index_kpool=pool,
        indexer_types=_types(read, fields, linear),
        hc_mult=4,
        hc_sinkhorn_iters=read.size("hc_sinkhorn_iters"),
        hc_eps=read.number("hc_eps"),
        swiglu_limit=read.number_or_null("swiglu_limit"),
    )


def _linear_fields(read: ConfigReader, n_heads: int) -> dict[str, Any]:
    """Return the fields about KDA, which may stand in an object of their own."""
    stated = read.raw.get("linear_attn_config") or {}
    if not isinstance(stated, dict):
        raise read.bad("linear_attn_config", "an object")
    net = ConfigReader(stated, read.path, "linear_attn_config.")
    check_linear_heads(read, net, n_heads)
    inside, outside = (net, "gate_lower_bound"), (read, "linear_lower_bound")
    bound = read_bound(*(inside if "gate_lower_bound" in stated else outside))
    if bound is None and stated and net.flag("safe_gate", True):
        bound = -5.0  # as in transformers
    return {
        "linear_head_dim": net.size("head_dim", read.size("linear_head_dim")),
        "linear_conv_kernel_dim": net.size(
            "short_conv_kernel_size", read.size("linear_conv_kernel_dim"), least=2
        ),
        "gate_lower_bound": bound,
    }


def _types(read: ConfigReader, fields: Mapping[str, Any], linear: tuple[int, ...]) -> tuple[bool, ...] | None:
    n_layers = fields["num_hidden_layers"]
    types = read_indexer_types(read, n_layers, fields["num_nextn_predict_layers"])
    if types is None:
        return None
    first = next(layer for layer in range(n_layers) if layer not in linear)
    if not types[first]:
        raise read.bad("indexer_types", f"'full' for layer {first}: no layer before it has an indexer")
    return types[:n_layers]


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> Glm5NextConfig:
    """Read the configuration out of the keys and tensors of a GGUF file; see `read_deepseek_file`."""
    config = read_kimi_file(family, metadata, shapes, path, rotates=False)
    hparams = read_hparams(metadata, family.gguf_name, path)
    size = hparams.size
    pool = size("indexer_kpool")
    if pool < 2 or size("indexer_top_k") % pool or not hparams.indexer_kpool_select_tail:
        raise UnsupportedCheckpoint(
            f"{path}: {hparams.key('indexer_kpool')} is {pool}, expected a divisor of"
            f" {hparams.key('indexer_top_k')} from 2 on, and {hparams.key('indexer_kpool_select_tail')}"
        )
    return Glm5NextConfig(
        **vars(config),
        states_theta=True,
        index_n_heads=size("indexer_head_count"),
        index_head_dim=size("indexer_key_length"),
        index_topk=size("indexer_top_k"),
        index_kpool=pool,
        indexer_types=hparams.flags("indexer_types", config.num_hidden_layers),
        hc_mult=size("hyper_connection_count"),
        hc_sinkhorn_iters=size("hyper_connection_iterations"),
        hc_eps=hparams.number("hyper_connection_epsilon", 1e-6),
        swiglu_limit=read_limit(hparams) or None,
    )


# ---- rules


def _own_layers(config: Glm5NextConfig, options: Any) -> range:
    return range(config.num_hidden_layers)


def _with_indexer(config: Glm5NextConfig, options: Any) -> list[int]:
    """Return the layers with an indexer of their own; MTP layers have one."""
    types = config.indexer_types or (True,) * config.num_hidden_layers
    return [layer for layer in latent_layers(config, options) if layer >= len(types) or types[layer]]


def _mixer(part: str) -> tuple[Rule, ...]:
    """Return the rules of what mixes streams around attention ("attn") or a block ("ffn")."""
    return (
        in_layer(_own_layers, f"hc_{part}_fn.weight", f"hc_{part}_fn", "hc_rows hc_cols"),
        in_layer(_own_layers, f"hc_{part}_base.weight", f"hc_{part}_base", "hc_rows"),
        in_layer(_own_layers, f"hc_{part}_scale.weight", f"hc_{part}_scale", "hc_scales"),
    )


def _indexer(name: str, source: str, sizes: str) -> Rule:
    return in_layer(_with_indexer, name, f"self_attn.indexer.{source}", sizes)


_RULES: tuple[Rule, ...] = (
    *ends(needs_output=True),
    *COMMON_RULES,
    *_mixer("attn"),
    *_mixer("ffn"),
    *kimi_delta("num_attention_heads"),
    *in_two("f"),
    *in_two("g"),
    _indexer("indexer.k_norm.weight", "k_norm.weight", "index_head_dim"),
    _indexer("indexer.k_norm.bias", "k_norm.bias", "index_head_dim"),
    _indexer("indexer.proj.weight", "weights_proj.weight", "index_n_heads hidden_size"),
    _indexer("indexer.attn_k.weight", "wk.weight", "index_head_dim hidden_size"),
    _indexer("indexer.attn_q_b.weight", "wq_b.weight", "index_q_rows q_lora_rank"),
    _indexer("indexer_compressor_gate.weight", "index_kpool_compress_gate", "index_head_dim hidden_size"),
    _indexer("indexer_compressor_ape.weight", "index_kpool_compress_ape", "index_kpool index_head_dim"),
    *expert_stacks(moe_layers),
    *mtp(),
)


def _forced_type(tensor: OutputTensor, wanted: GGMLType) -> GGMLType | None:
    """Return F32 for what llama.cpp's converter keeps exact."""
    exact = any(part in tensor.name for part in (".hc_attn_", ".hc_ffn_", ".indexer_compressor_"))
    return F32 if exact else float32_kernels(tensor, wanted)


# ---- keys

_u32, _f32, _bool = Value.u32, Value.f32, Value.bool_


def _limits(config: Glm5NextConfig, options: Any) -> list[float] | None:
    limit = config.swiglu_limit
    return None if limit is None else [limit] * len(layers(config, options))


_EPS = 1e-6
"""Epsilon of the indexers' LayerNorm."""

_NEXTN = Key(keys.NEXTN_PREDICT_LAYERS, _u32, lambda c, o: len(mtp_layers(c, o)) or None)
_NORMED = Key(keys.LAYERNORM_EPS, _f32, lambda c, o: _EPS)
_THETA = Key(keys.ROPE_FREQ_BASE, _f32, lambda c, o: c.rope.theta if c.states_theta else None)
_BASE = changed(kimi_keys(lambda c: c.kv_lora_rank), *GROUPS, _THETA)

_METADATA: tuple[Key, ...] = (
    *inserted(inserted(_BASE, _NEXTN, after=keys.VOCAB_SIZE), _NORMED, after=keys.VOCAB_SIZE),
    Key(keys.INDEXER_HEAD_COUNT, _u32, lambda c, o: c.index_n_heads),
    Key(keys.INDEXER_KEY_LENGTH, _u32, lambda c, o: c.index_head_dim),
    Key(keys.INDEXER_TOP_K, _u32, lambda c, o: c.index_topk),
    Key(keys.INDEXER_KPOOL, _u32, lambda c, o: c.index_kpool),
    Key(keys.INDEXER_KPOOL_SELECT_TAIL, _bool, lambda c, o: True),
    Key(keys.INDEXER_TYPES, Value.bools, lambda c, o: c.indexer_types),
    Key(keys.HYPER_CONNECTION_COUNT, _u32, lambda c, o: c.hc_mult),
    Key(keys.HYPER_CONNECTION_ITERATIONS, _u32, lambda c, o: c.hc_sinkhorn_iters),
    Key(keys.HYPER_CONNECTION_EPSILON, _f32, lambda c, o: c.hc_eps),
    DENSE_LAYERS,
    EXPERT_WIDTH,
    SHARED_EXPERTS,
    EXPERT_SCALE,
    EXPERT_NORM,
    Key(keys.SWIGLU_CLAMP_EXP, Value.f32s, _limits),
    Key(keys.SWIGLU_CLAMP_SHEXP, Value.f32s, _limits),
)

_GLM5_NEXT = kimi(
    "Glm5NextForConditionalGeneration",
    gguf_name="glm5-next",
    options=MTPOptions,
    check=check_mtp,
    resolve_options=keep_last_mtp,
    read_config=_read,
    rules=_RULES,
    metadata=_METADATA,
    drops=lambda config, options: (*mtp_drops(config, options), DROP_VISION),
    notes=lambda config, options: (),
    canonical_name=None,
    forced_type=_forced_type,
    quirks=GLM,
    unset_gating="sigmoid",
    says_norm=True,
    reader=_read_file,
)

FAMILIES = (_GLM5_NEXT,)
