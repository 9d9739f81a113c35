"""DeepSeek V4 and V4-Flash as llama.cpp's `deepseek4`: names, types and keys of its own.

V4Config is what config.json says, checked. The keys deepseek4.* are in the order of llama.cpp's converter,
and the reader of files is the inverse.

All tensors are renamed, and the experts of a layer stacked. Routing tables and stacks of experts stand first,
layer by layer: llama.cpp's converter writes them before it goes through the checkpoint.

There is no free choice of output type: codes of experts and routing tables stay as they are stored, matrices
that are FP8 become Q8_0, BF16 stays BF16 and F32 stays F32, as in llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader
from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.decoder.family import yarn_notes
from convert.architectures.decoder.metadata import (
    COMMON,
    EXPERT_NORM,
    EXPERT_SCALE,
    EXPERT_WIDTH,
    GATING_FUNCTIONS,
    ROTATED_COLS,
    SHARED_EXPERTS,
    SLIDING_WINDOW,
    changed,
    read_rotation,
    read_theta,
    refuse_sizes_in_windows,
    refuse_unlike,
    scoring_function,
)
from convert.architectures.decoder.rope import RopeConfig, read_rope
from convert.architectures.decoder.rules import gate_rows, layers, once, one, tied, untied, up_rows
from convert.architectures.options import NoOptions
from convert.architectures.rules import Drop, Output, OutputTensor, Rule, Where, stacked
from gguf_tools.errors import BadConfig, FormatError, MissingTensor, UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import BF16, F32, I32, MXFP4, Q8_0, GGMLType
from gguf_tools.format.hparams import HParams, read_hparams
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import quoted

NAME = "DeepseekV4ForCausalLM"
OVERLAPPING = 4
"""The ratio whose windows overlap, so that keys and gates have twice the columns, and which has indexers."""


_FIXED: Mapping[str, Any] = {
    "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "n_shared_experts": 1, "hc_mult": 4,
}  # fmt: skip
"""Fields with one possible value: of the loader (src/models/deepseek4.cpp), or of transformers' model."""


@dataclass(frozen=True, kw_only=True)
class V4Config(DecoderConfig):
    """Configuration of a model; names as in config.json, or as other decoders have them.

    compress_ratios  per layer how many positions are compressed to one; 0 where none are
    mtp_ratios       the same for what comes after the model's own layers, as far as config.json goes
    heavy_ratio      the ratio of compressing layers without an indexer; 1 where there are none
    intermediate_size  0 where config.json has none, as in the published models
    """

    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_rope_theta: float
    compress_ratios: tuple[int, ...]
    heavy_ratio: int
    num_hash_layers: int
    swiglu_limit: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    mtp_ratios: tuple[int, ...] = ()

    light_ratio: ClassVar[int] = OVERLAPPING
    hc_scales: ClassVar[int] = 3
    hc_head_scales: ClassVar[int] = 1

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], path: str | Path = "config.json") -> V4Config:
        """Return the configuration in `raw`, the content of `path`.

        raises  BadConfig naming file and key, UnsupportedCheckpoint for what no file can say
        """
        read = ConfigReader(raw, path)
        read.architecture((NAME,))
        read.fixed("hidden_act", "silu", "llama.cpp's deepseek4 has no other activation")
        read.fixed("attention_bias", False, "llama.cpp's deepseek4 has no attention biases")
        for key, value in _FIXED.items():
            read.fixed(key, value, "llama.cpp's deepseek4, or the original, computes with no other")
        n_layers = read.size("num_hidden_layers", most=MAX_LAYERS)
        n_experts = read.size("n_routed_experts", most=MAX_EXPERTS)
        heads, head_dim = read.size("num_attention_heads"), read.size("head_dim")
        groups = read.size("o_groups", 8)
        if heads % groups:
            raise read.bad("o_groups", f"a divisor of num_attention_heads ({heads})")
        context = read.size("max_position_embeddings")
        rope = _read_rotation(read, context)
        return cls(
            architecture=NAME,
            vocab_size=read.size("vocab_size"),
            hidden_size=read.size("hidden_size"),
            intermediate_size=read.size_or_null("intermediate_size", None) or 0,
            moe_intermediate_size=read.size("moe_intermediate_size"),
            num_hidden_layers=n_layers,
            num_attention_heads=heads,
            num_key_value_heads=read.size("num_key_value_heads", 1, most=1),
            head_dim=head_dim,
            stated_head_dim=head_dim,
            q_lora_rank=read.size("q_lora_rank"),
            o_lora_rank=read.size("o_lora_rank"),
            o_groups=groups,
            rotated_cols=read.size("qk_rope_head_dim", most=head_dim),
            max_position_embeddings=context,
            sliding_window=read.size("sliding_window"),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            rope=rope,
            compress_rope_theta=read.number("compress_rope_theta", 160000.0),
            **_ratios(read, n_layers),
            num_experts=n_experts,
            num_shared_experts=1,
            num_experts_per_tok=read.size("num_experts_per_tok", most=n_experts),
            num_hash_layers=_hash_layers(read, n_layers),
            scoring_func="sqrtsoftplus",
            norm_topk_prob=True,
            routed_scaling_factor=read.number("routed_scaling_factor", 1.5),
            swiglu_limit=read.number("swiglu_limit", 10.0),
            index_n_heads=read.size("index_n_heads"),
            index_head_dim=read.size("index_head_dim"),
            index_topk=read.size("index_topk"),
            hc_mult=4,
            hc_sinkhorn_iters=read.size("hc_sinkhorn_iters", 20),
            hc_eps=read.number("hc_eps", 1e-6),
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
        )

    @property
    def n_routed_experts(self) -> int:
        return self.num_experts

    @property
    def o_cols(self) -> int:
        """Columns of wo_a: a group's share of all heads."""
        return self.q_rows // self.o_groups

    @property
    def o_rows(self) -> int:
        """Rows of wo_a, columns of wo_b: what all groups are compressed to."""
        return self.o_groups * self.o_lora_rank

    @property
    def two_heads(self) -> int:
        """Columns of compressed keys where windows overlap."""
        return 2 * self.head_dim

    @property
    def two_index_heads(self) -> int:
        return 2 * self.index_head_dim

    @property
    def index_q_rows(self) -> int:
        return self.index_n_heads * self.index_head_dim

    @property
    def hc_cols(self) -> int:
        """Columns of the hyper-connections' matrices: all streams of hidden states."""
        return self.hc_mult * self.hidden_size

    @property
    def hc_rows(self) -> int:
        """Weights of a hyper-connection: one a stream before and after, and those of streams with streams."""
        return (2 + self.hc_mult) * self.hc_mult


def _read_rotation(read: ConfigReader, context: int) -> RopeConfig:
    """Return the rotation of layers that compress, as published; the others are not stretched."""
    read.fixed("original_max_position_embeddings", None, "transformers reads it only in rope_scaling")
    if {*(read.raw.get("rope_parameters") or ())} & {"main", "compress"}:
        raise read.bad("rope_parameters", "none, or one rotation as in rope_scaling of published models")
    rope = read_rope(read, context, kinds=("default", "yarn"))
    if rope.attention_factor not in (None, 1.0):
        raise UnsupportedCheckpoint(
            f"{read.path}: attention_factor is {rope.attention_factor:g}, expected 1 or none:"
            " llama.cpp's deepseek4 multiplies nothing by it"
        )
    return rope


def _hash_layers(read: ConfigReader, n_layers: int) -> int:
    """Return how many leading layers choose experts by token, from either spelling."""
    kinds = read.raw.get("mlp_layer_types")
    if kinds is None:
        return read.size("num_hash_layers", 3, least=0, most=n_layers)
    read.overruled("num_hash_layers")
    n_hash = kinds.count("hash_moe") if isinstance(kinds, list) else 0
    if kinds != ["hash_moe"] * n_hash + ["moe"] * (n_layers - n_hash):
        raise read.bad("mlp_layer_types", f"'hash_moe' for the first layers, then 'moe', {n_layers} in all")
    return n_hash


def _ratios(read: ConfigReader, n_layers: int) -> dict[str, Any]:
    """Return compress_ratios of the model's layers, the heavy one among them, and those of MTP layers."""
    ratios = read.raw.get("compress_ratios")
    are_numbers = isinstance(ratios, list) and all(type(ratio) is int and ratio >= 0 for ratio in ratios)
    if not isinstance(ratios, list) or not are_numbers or len(ratios) < n_layers:
        found = str(ratios)[:80]
        raise BadConfig(
            f"{read.path}: compress_ratios is {found}, expected a number for each of {n_layers} layers"
        )
    own = tuple(ratios[:n_layers])
    heavy = {ratio for ratio in own if ratio not in (0, OVERLAPPING)}
    if len(heavy) > 1:
        raise read.bad("compress_ratios", f"0, {OVERLAPPING} and at most one other ratio")
    if OVERLAPPING not in own:
        expected = f"a {OVERLAPPING} in num_hidden_layers ({n_layers})"
        raise read.bad("compress_ratios", f"{expected}: llama.cpp ends where no layer has an indexer")
    rates = {"compress_rate_csa": {OVERLAPPING}, "compress_rate_hca": heavy}
    for key, stated in rates.items():
        if stated:
            read.fixed(key, next(iter(stated)), "as in compress_ratios")
    return {
        "compress_ratios": own,
        "heavy_ratio": heavy.pop() if heavy else 1,
        "mtp_ratios": tuple(ratios[n_layers:]),
    }


_GATING_FUNCTIONS: Mapping[str, int] = {**GATING_FUNCTIONS, "sqrtsoftplus": 4}

_u32, _f32, _f32s = Value.u32, Value.f32, Value.f32s


def _limits(config: Any, options: Any) -> tuple[float, ...]:
    return (config.swiglu_limit,) * config.num_hidden_layers


METADATA: tuple[Key, ...] = (
    *changed(COMMON, Key(keys.EXPERT_GATING_FUNC, _u32, lambda c, o: _GATING_FUNCTIONS[c.scoring_func])),
    ROTATED_COLS,
    Key(keys.Q_LORA_RANK, _u32, lambda c, o: c.q_lora_rank),
    SLIDING_WINDOW,
    EXPERT_WIDTH,
    SHARED_EXPERTS,
    EXPERT_SCALE,
    EXPERT_NORM,
    Key(keys.SWIGLU_CLAMP_EXP, _f32s, _limits),
    Key(keys.SWIGLU_CLAMP_SHEXP, _f32s, _limits),
    Key(keys.INDEXER_HEAD_COUNT, _u32, lambda c, o: c.index_n_heads),
    Key(keys.INDEXER_KEY_LENGTH, _u32, lambda c, o: c.index_head_dim),
    Key(keys.INDEXER_TOP_K, _u32, lambda c, o: c.index_topk),
    Key(keys.OUTPUT_GROUP_COUNT, _u32, lambda c, o: c.o_groups),
    Key(keys.OUTPUT_LORA_RANK, _u32, lambda c, o: c.o_lora_rank),
    Key(keys.COMPRESS_RATIOS, Value.i32s, lambda c, o: (*c.compress_ratios, *c.mtp_ratios)),
    Key(keys.COMPRESS_ROPE_FREQ_BASE, _f32, lambda c, o: c.compress_rope_theta),
    Key(keys.HYPER_CONNECTION_COUNT, _u32, lambda c, o: c.hc_mult),
    Key(keys.HYPER_CONNECTION_ITERATIONS, _u32, lambda c, o: c.hc_sinkhorn_iters),
    Key(keys.HYPER_CONNECTION_EPSILON, _f32, lambda c, o: c.hc_eps),
    Key(keys.HASH_LAYER_COUNT, _u32, lambda c, o: c.num_hash_layers),
    Key(keys.EMBEDDING_LENGTH_OUT, _u32, lambda c, o: c.hc_mult * c.hidden_size),
)


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> V4Config:
    """Read the configuration out of the keys and tensors of a GGUF file.

    shapes  tensor name -> shape, rows first
    raises  FormatError, MissingTensor, UnsupportedCheckpoint, naming the file and the key
    """
    hparams = read_hparams(metadata, family.gguf_name, path)
    refuse_unlike(hparams)
    refuse_sizes_in_windows(hparams)
    size = hparams.size
    if "token_embd.weight" not in shapes:
        raise MissingTensor(f"{path}: no tensor token_embd.weight")
    theta = read_theta(hparams, "compress_rope_freq_base", 160000.0)
    heads, head_dim, groups = size("head_count"), size("key_length"), size("output_group_count")
    rotated = size("rope_dimension_count")
    if not heads or not groups or heads % groups or rotated % 2 or not 0 < rotated <= head_dim:
        raise FormatError(
            f"{path}: {heads} heads of {head_dim} columns in {groups} groups, {rotated} columns rotated:"
            " expected a deepseek4 model"
        )
    ratios = _ratios_of(hparams)
    return V4Config(
        architecture=family.hf_names[0],
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=size("embedding_length"),
        intermediate_size=hparams.first("feed_forward_length") or 0,
        moe_intermediate_size=size("expert_feed_forward_length"),
        num_hidden_layers=size("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=size("head_count_kv", 1),
        head_dim=head_dim,
        stated_head_dim=head_dim,
        q_lora_rank=size("q_lora_rank"),
        o_lora_rank=size("output_lora_rank"),
        o_groups=groups,
        rotated_cols=rotated,
        max_position_embeddings=size("context_length", 0),
        sliding_window=size("sliding_window"),
        rms_norm_eps=hparams.number("layer_norm_rms_epsilon", 1e-6),
        # Whatever the file says, nothing is multiplied by a factor.
        rope=replace(read_rotation(hparams), attention_factor=1.0),
        compress_rope_theta=theta,
        compress_ratios=ratios,
        heavy_ratio=next((ratio for ratio in ratios if ratio not in (0, OVERLAPPING)), 1),
        num_experts=size("expert_count"),
        num_shared_experts=size("expert_shared_count"),
        num_experts_per_tok=size("expert_used_count"),
        num_hash_layers=size("hash_layer_count"),
        scoring_func=scoring_function(hparams, _GATING_FUNCTIONS),
        norm_topk_prob=hparams.expert_weights_norm is not False,
        routed_scaling_factor=hparams.number("expert_weights_scale", 1.0) or 1.0,
        swiglu_limit=read_limit(hparams),
        index_n_heads=size("indexer_head_count"),
        index_head_dim=size("indexer_key_length"),
        index_topk=size("indexer_top_k"),
        hc_mult=size("hyper_connection_count"),
        hc_sinkhorn_iters=size("hyper_connection_iterations"),
        hc_eps=hparams.number("hyper_connection_epsilon", 1e-6),
        tie_word_embeddings="output.weight" not in shapes,
    )


def _ratios_of(hparams: HParams) -> tuple[int, ...]:
    ratios, n_layers = hparams.compress_ratios, hparams.size("block_count")
    if not isinstance(ratios, tuple) or len(ratios) < n_layers or min(ratios, default=0) < 0:
        raise FormatError(
            f"{hparams.path}: {hparams.key('compress_ratios')} is {quoted(ratios)},"
            f" expected a number for each of {n_layers} layers"
        )
    return ratios[:n_layers]


def read_limit(hparams: HParams) -> float:
    """Return the limit of gate and up, which has to be the same in all layers; 0 for none."""
    limits: set[float] = set()
    for stated in (hparams.swiglu_clamp_exp, hparams.swiglu_clamp_shexp):
        if stated is not None:
            limits |= set(stated if isinstance(stated, tuple) else (stated,))
    if len(limits) > 1:
        raise UnsupportedCheckpoint(
            f"{hparams.path}: {hparams.key('swiglu_clamp_exp')} has {len(limits)} limits,"
            " expected one for all experts and layers"
        )
    return limits.pop() if limits else 0.0


_STACK = "layers.{layer}.ffn.experts"
_EXPERT = f"{_STACK}.{{expert}}"


def _hashed(config: V4Config, options: Any) -> range:
    """Return the layers whose experts follow from the token, by a table."""
    return range(config.num_hash_layers)


def _scored(config: V4Config, options: Any) -> range:
    return range(config.num_hash_layers, config.num_hidden_layers)


def _light(config: V4Config, options: Any) -> list[int]:
    """Return the layers that compress few positions, and choose among them with an indexer."""
    return [layer for layer, ratio in enumerate(config.compress_ratios) if ratio == OVERLAPPING]


def _heavy(config: V4Config, options: Any) -> list[int]:
    return [layer for layer, ratio in enumerate(config.compress_ratios) if ratio not in (0, OVERLAPPING)]


def _in_layer(where: Where, name: str, source: str, sizes: str) -> Rule:
    return one(where, f"blk.{{layer}}.{name}", f"layers.{{layer}}.{source}", sizes)


def _hyper_connection(part: str) -> tuple[Rule, ...]:
    return (
        _in_layer(layers, f"hc_{part}_fn.weight", f"hc_{part}_fn", "hc_rows hc_cols"),
        _in_layer(layers, f"hc_{part}_base.weight", f"hc_{part}_base", "hc_rows"),
        _in_layer(layers, f"hc_{part}_scale.weight", f"hc_{part}_scale", "hc_scales"),
    )


def _compressor(where: Where, name: str, source: str, ratio: str, cols: str, head: str) -> tuple[Rule, ...]:
    return (
        _in_layer(where, f"{name}_ape.weight", f"{source}.ape", f"{ratio} {cols}"),
        _in_layer(where, f"{name}_kv.weight", f"{source}.wkv.weight", f"{cols} hidden_size"),
        _in_layer(where, f"{name}_gate.weight", f"{source}.wgate.weight", f"{cols} hidden_size"),
        _in_layer(where, f"{name}_norm.weight", f"{source}.norm.weight", head),
    )


RULES: tuple[Rule, ...] = (
    Rule(_hashed, (
        Output("blk.{layer}.ffn_gate_tid2eid.weight", "layers.{layer}.ffn.gate.tid2eid",
               "vocab_size num_experts_per_tok"),
    ), first=True),
    Rule(layers, (
        Output("blk.{layer}.ffn_gate_exps.weight", f"{_EXPERT}.w1.weight",
               "moe_intermediate_size hidden_size", stacked),
        Output("blk.{layer}.ffn_down_exps.weight", f"{_EXPERT}.w2.weight",
               "hidden_size moe_intermediate_size", stacked),
        Output("blk.{layer}.ffn_up_exps.weight", f"{_EXPERT}.w3.weight",
               "moe_intermediate_size hidden_size", stacked),
    ), first=True, unless=(f"{_STACK}.gate_up_proj",)),
    Rule(layers, (
        Output("blk.{layer}.ffn_gate_exps.weight", f"{_STACK}.gate_up_proj",
               "n_routed_experts gate_up_rows hidden_size", gate_rows),
        Output("blk.{layer}.ffn_down_exps.weight", f"{_STACK}.down_proj",
               "n_routed_experts hidden_size moe_intermediate_size"),
        Output("blk.{layer}.ffn_up_exps.weight", f"{_STACK}.gate_up_proj",
               "n_routed_experts gate_up_rows hidden_size", up_rows),
    ), first=True, when=(f"{_STACK}.gate_up_proj",)),

    one(once, "token_embd.weight", "embed.weight", "vocab_size hidden_size"),
    one(once, "output_norm.weight", "norm.weight", "hidden_size"),
    one(untied, "output.weight", "head.weight", "vocab_size hidden_size"),
    replace(one(tied, "output.weight", "head.weight", "vocab_size hidden_size"), optional=True),
    replace(one(tied, "output.weight", "embed.weight", "vocab_size hidden_size"), unless=("head.weight",)),
    one(once, "output_hc_fn.weight", "hc_head_fn", "hc_mult hc_cols"),
    one(once, "output_hc_base.weight", "hc_head_base", "hc_mult"),
    one(once, "output_hc_scale.weight", "hc_head_scale", "hc_head_scales"),

    *_hyper_connection("attn"),
    *_hyper_connection("ffn"),
    _in_layer(layers, "attn_norm.weight", "attn_norm.weight", "hidden_size"),
    _in_layer(layers, "attn_sinks.weight", "attn.attn_sink", "num_attention_heads"),
    _in_layer(layers, "attn_q_a.weight", "attn.wq_a.weight", "q_lora_rank hidden_size"),
    _in_layer(layers, "attn_q_a_norm.weight", "attn.q_norm.weight", "q_lora_rank"),
    _in_layer(layers, "attn_q_b.weight", "attn.wq_b.weight", "q_rows q_lora_rank"),
    _in_layer(layers, "attn_kv.weight", "attn.wkv.weight", "head_dim hidden_size"),
    _in_layer(layers, "attn_kv_a_norm.weight", "attn.kv_norm.weight", "head_dim"),
    _in_layer(layers, "attn_output_a.weight", "attn.wo_a.weight", "o_rows o_cols"),
    _in_layer(layers, "attn_output_b.weight", "attn.wo_b.weight", "hidden_size o_rows"),
    *_compressor(_light, "attn_compressor", "attn.compressor", "light_ratio", "two_heads", "head_dim"),
    *_compressor(_heavy, "attn_compressor", "attn.compressor", "heavy_ratio", "head_dim", "head_dim"),
    _in_layer(_light, "indexer.attn_q_b.weight", "attn.indexer.wq_b.weight", "index_q_rows q_lora_rank"),
    _in_layer(_light, "indexer.proj.weight", "attn.indexer.weights_proj.weight", "index_n_heads hidden_size"),
    *_compressor(_light, "indexer_compressor", "attn.indexer.compressor", "light_ratio", "two_index_heads",
                 "index_head_dim"),

    _in_layer(layers, "ffn_norm.weight", "ffn_norm.weight", "hidden_size"),
    _in_layer(layers, "ffn_gate_inp.weight", "ffn.gate.weight", "n_routed_experts hidden_size"),
    _in_layer(_scored, "exp_probs_b.bias", "ffn.gate.bias", "n_routed_experts"),
    _in_layer(layers, "ffn_gate_shexp.weight", "ffn.shared_experts.w1.weight",
              "shared_intermediate_size hidden_size"),
    _in_layer(layers, "ffn_down_shexp.weight", "ffn.shared_experts.w2.weight",
              "hidden_size shared_intermediate_size"),
    _in_layer(layers, "ffn_up_shexp.weight", "ffn.shared_experts.w3.weight",
              "shared_intermediate_size hidden_size"),
)  # fmt: skip


_PARTS = (
    ("embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("hc_head.hc_", "hc_head_"),
    (".self_attn.", ".attn."),
    (".mlp.", ".ffn."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    (".sinks", ".attn_sink"),
    (".compressor.indexer.scorer.weights_proj.", ".indexer.weights_proj."),
    (".compressor.indexer.q_b_proj.", ".indexer.wq_b."),
    (".compressor.indexer.", ".indexer.compressor."),
    (".compressor.kv_norm.", ".compressor.norm."),
    (".compressor.gate_proj.", ".compressor.wgate."),
    (".position_bias", ".ape"),
    (".kv_proj.", ".wkv."),
    (".q_a_proj.", ".wq_a."),
    (".q_a_norm.", ".q_norm."),
    (".q_b_proj.", ".wq_b."),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".attn.norm.", ".attn.kv_norm."),
    (".e_score_correction_bias", ".bias"),
    (".shared_experts.gate_proj.", ".shared_experts.w1."),
    (".shared_experts.down_proj.", ".shared_experts.w2."),
    (".shared_experts.up_proj.", ".shared_experts.w3."),
)
"""Parts of names in transformers 5 -> published parts, in the order in which they are replaced.

The table is the inverse of the one that transformers 5.24 reads published checkpoints with ("deepseek_v4" in
conversion_mapping.py). Its own inverse goes wrong for a few names, which it saves half-renamed.
"""


def _published_name(name: str) -> str:
    """Return the published name of a weight; published names stay as they are."""
    name = name.removeprefix("model.")
    for part, published in _PARTS:
        name = name.replace(part, published, 1)
    return name


def drops(config: V4Config, options: Any) -> tuple[Drop, ...]:
    """Return the weights that this model's checkpoint may hold and the file does not need."""
    mtp = Drop(lambda name: name.startswith("mtp."), "multi-token prediction layer, which llama.cpp has not")
    return (mtp,)


def _forced_type(tensor: OutputTensor, wanted: GGMLType) -> GGMLType | None:
    """Return the type that a matrix has under every --outtype, None for what the general rules decide."""
    if len(tensor.shape) < 2 or tensor.name.endswith("_norm.weight"):
        return None
    if tensor.stored_as.startswith("F8_"):
        return Q8_0
    return {"BF16": BF16, "F32": F32}.get(tensor.stored_as)


def _notes(config: V4Config, options: NoOptions) -> tuple[str, ...]:
    ramp = () if config.rope.yarn is None else yarn_notes(config.rope.yarn)
    types = "--outtype counts for nothing: FP8 becomes Q8_0, all else keeps the type of the checkpoint"
    return types, *ramp


ARCHITECTURE = Architecture(
    hf_names=(NAME,),
    gguf_name="deepseek4",
    read_config=V4Config.from_dict,
    n_experts=lambda config: config.num_experts,
    rules=RULES,
    drops=drops,
    metadata=METADATA,
    notes=_notes,
    canonical_name=_published_name,
    kept=frozenset({MXFP4, I32}),
    forced_type=_forced_type,
    reader=_read_file,
)
FAMILIES = (ARCHITECTURE,)
