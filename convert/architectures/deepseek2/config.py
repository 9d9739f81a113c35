"""DeepseekConfig: what config.json says about a DeepSeek V2 or V3 model or a relative, checked and complete.

Two spellings are read: `rope_scaling` with `type` and `rope_theta` beside it (the published models), and
`rope_parameters` with `rope_type` and `rope_theta` inside it (transformers 5). Where both stand,
transformers takes `rope_scaling`, and so do we.

A missing size is an error. Where config.json doesn't say how the model computes, it computes as
transformers does for that architecture: DEFAULTS. A value that the architecture doesn't compute with
(softmax for V3, say) is an error: transformers would ignore it, and no GGUF key can express what was meant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.architectures.config_reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader, shown
from convert.checkpoint.model_config import MISTRAL_LARGE_3
from gguf_tools.errors import BadConfig, UnsupportedCheckpoint

V2 = "DeepseekV2ForCausalLM"
V3 = "DeepseekV3ForCausalLM"
GLM_LITE = "Glm4MoeLiteForCausalLM"
YOUTU = "YoutuForCausalLM"
KIMI_VL = "KimiVLForConditionalGeneration"
KIMI_K25 = "KimiK25ForConditionalGeneration"
V32 = "DeepseekV32ForCausalLM"
GLM_DSA = "GlmMoeDsaForCausalLM"


@dataclass(frozen=True)
class Defaults:
    """How an architecture computes where config.json doesn't say.

    scoring, methods  possible values of scoring_func and topk_method, the default first. noaux_tc: a bias
                      takes part in the choice of experts, and their scores weigh them
    normalises        whether norm_topk_prob counts; it is true where it is missing
    scale             routed_scaling_factor
    groups            n_group and topk_group
    dense             first_k_dense_replace
    experts           False for a model that may have none at all
    eps               rms_norm_eps
    tied              tie_word_embeddings
    """

    scoring: tuple[str, ...] = ("sigmoid",)
    methods: tuple[str, ...] = ("noaux_tc",)
    normalises: bool = True
    scale: float = 2.5
    groups: tuple[int, int] | None = (8, 4)
    dense: int = 3
    experts: bool = True
    eps: float = 1e-6
    tied: bool = False


DEFAULTS: Mapping[str, Defaults] = {
    V2: Defaults(("softmax",), ("greedy", "group_limited_greedy"), False, 1.0, None, 0),
    V3: Defaults(),
    KIMI_VL: Defaults(),
    KIMI_K25: Defaults(),
    GLM_LITE: Defaults(scale=1.8, groups=(1, 1), dense=1, eps=1e-5),
    YOUTU: Defaults(experts=False, tied=True),
    V32: Defaults(),
    GLM_DSA: Defaults(groups=(1, 1), eps=1e-5),
    MISTRAL_LARGE_3: Defaults(
        ("softmax",), ("greedy", "group_limited_greedy"), scale=1.0, groups=(1, 1), dense=0
    ),
}
"""Architecture -> its defaults: those of transformers' classes (5.23), and for Kimi, which has none, V3's."""

_FIXED: Mapping[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "llama.cpp's deepseek2 has no other activation"),
    "attention_bias": (False, "llama.cpp's deepseek2 has no attention biases"),
    "mlp_bias": (False, "llama.cpp's deepseek2 has no feed-forward biases"),
    "rope_interleave": (True, "llama.cpp's deepseek2 rotates neighbouring pairs"),
    "moe_layer_freq": (1, "every layer after the leading dense ones is a mixture of experts"),
    "partial_rotary_factor": (1.0, "qk_rope_head_dim is rotated as a whole"),
}
"""Keys with only one possible value, also when missing -> (value, why)."""


@dataclass(frozen=True)
class Yarn:
    """RoPE scaled by YaRN.

    factor            how much longer the context has become
    original_context  the length before
    mscale, mscale_all_dim, attention_factor  None where config.json has none
    """

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    attention_factor: float | None

    @property
    def rotary_factor(self) -> float:
        """What transformers multiplies the rotated part of queries and of keys with."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True)
class DeepseekConfig:
    """What a model is made of and how it computes; names as in config.json.

    architecture     one of DEFAULTS
    q_lora_rank      None when queries are not compressed
    n_routed_experts 0 for a model whose layers are all dense
    n_group          None when experts are not grouped
    norm_topk_prob   whether the model normalises the weights of the chosen experts (never for V2)
    norm_requested   what config.json says about it, whether or not the architecture obeys
    yarn             None for plain RoPE
    lengths_first    whether llama.cpp's converter sees a head_dim: it writes the lengths of keys and values
                     among the first keys then
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    n_group: int | None
    topk_group: int | None
    topk_method: str
    scoring_func: str
    norm_topk_prob: bool
    norm_requested: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    yarn: Yarn | None
    tie_word_embeddings: bool
    num_nextn_predict_layers: int
    lengths_first: bool = True

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], path: str | Path = "config.json") -> DeepseekConfig:
        """Return the configuration in `raw`, the content of `path`.

        raises  BadConfig naming file and key for a missing or impossible value,
                UnsupportedCheckpoint for what llama.cpp's deepseek2 does not compute
        """
        read = ConfigReader(raw, path)
        architecture = read.architecture(DEFAULTS)
        defaults = DEFAULTS[architecture]
        for key, (value, why) in _FIXED.items():
            read.fixed(key, value, why)
        heads = read.size("num_attention_heads")
        if raw.get("num_key_value_heads") not in (None, heads):
            raise read.bad(
                "num_key_value_heads", f"{heads} (num_attention_heads): every head has keys of its own"
            )
        has_experts = defaults.experts or raw.get("n_routed_experts") is not None
        n_experts = read.size("n_routed_experts", most=MAX_EXPERTS) if has_experts else 0
        norm_requested = has_experts and read.flag("norm_topk_prob", defaults.normalises)
        context = read.size("max_position_embeddings")
        theta, yarn = _read_rope(raw, path, context)
        n_layers = read.size("num_hidden_layers", most=MAX_LAYERS)
        width = read.size("intermediate_size")
        topk_method = read.choice("topk_method", defaults.methods)
        n_group, topk_group = None, None
        if has_experts:
            n_group, topk_group = _read_groups(read, n_experts, topk_method, defaults)
        return cls(
            architecture=architecture,
            vocab_size=read.size("vocab_size"),
            hidden_size=read.size("hidden_size"),
            intermediate_size=width,
            moe_intermediate_size=read.size("moe_intermediate_size") if has_experts else width,
            num_hidden_layers=n_layers,
            num_attention_heads=heads,
            q_lora_rank=read.size_or_null("q_lora_rank"),
            kv_lora_rank=read.size("kv_lora_rank"),
            qk_nope_head_dim=read.size("qk_nope_head_dim"),
            qk_rope_head_dim=read.size("qk_rope_head_dim"),
            v_head_dim=read.size("v_head_dim"),
            n_routed_experts=n_experts,
            n_shared_experts=read.size("n_shared_experts") if has_experts else 0,
            num_experts_per_tok=read.size("num_experts_per_tok", most=n_experts) if has_experts else 0,
            first_k_dense_replace=_n_dense(read, n_layers, defaults) if has_experts else n_layers,
            n_group=n_group,
            topk_group=topk_group,
            topk_method=topk_method,
            scoring_func=read.choice("scoring_func", defaults.scoring),
            norm_topk_prob=defaults.normalises and norm_requested,
            norm_requested=norm_requested,
            routed_scaling_factor=read.number("routed_scaling_factor", defaults.scale),
            rms_norm_eps=read.number("rms_norm_eps", defaults.eps),
            max_position_embeddings=context,
            rope_theta=theta,
            yarn=yarn,
            tie_word_embeddings=read.flag("tie_word_embeddings", defaults.tied),
            num_nextn_predict_layers=read.size(
                "num_mtp_layers" if "num_mtp_layers" in raw else "num_nextn_predict_layers",
                0,
                least=0,
                most=MAX_LAYERS,
            ),
            # transformers 4.57, which that converter reads config.json with, knows these two alone.
            lengths_first="head_dim" in raw
            or (architecture in (V2, V3) and raw.get("model_type") in ("deepseek_v2", "deepseek_v3")),
        )

    @property
    def is_v3(self) -> bool:
        return self.architecture == V3

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def q_rows(self) -> int:
        """Rows of q_proj or q_b_proj: every head's query."""
        return self.num_attention_heads * self.qk_head_dim

    @property
    def kv_a_rows(self) -> int:
        """Rows of kv_a_proj_with_mqa: the latent, then the rotated key that all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kv_b_rows(self) -> int:
        """Rows of kv_b_proj: per head its qk_nope_head_dim key rows, then its v_head_dim value rows."""
        return self.num_attention_heads * (self.qk_nope_head_dim + self.v_head_dim)

    @property
    def attention_cols(self) -> int:
        """Columns of o_proj: every head's value."""
        return self.num_attention_heads * self.v_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, which are stored as one."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def concat_size(self) -> int:
        """Columns of the MTP layer's eh_proj: an embedding beside a hidden state."""
        return 2 * self.hidden_size

    @property
    def indexer(self) -> Indexer | None:
        """What chooses the positions that tokens attend to; None where they attend to all."""
        return None

    @property
    def sharpness(self) -> tuple[float, int] | None:
        """s and n: scores of position p are multiplied by 1 + s ln(1 + floor(p / n)); None where not."""
        return None

    @property
    def expert_groups(self) -> tuple[int, int] | None:
        """How many groups of experts, and how many may be used; (1, 1) where the choice isn't restricted."""
        if self.n_group is None or self.topk_group is None:
            return None
        if self.topk_method == "greedy" or self.topk_group == self.n_group:
            return 1, 1
        return self.n_group, self.topk_group


@dataclass(frozen=True)
class Indexer:
    """What chooses the positions that tokens attend to.

    n_chosen  how many it chooses
    layers    per layer whether it has an indexer of its own; others use the choice of a layer before them
    """

    n_heads: int
    head_dim: int
    n_chosen: int
    layers: tuple[bool, ...]

    @property
    def hands_on(self) -> bool:
        """Whether a layer attends to what an earlier one has chosen."""
        return not all(self.layers)

    def is_in(self, layer: int) -> bool:
        """Return whether a layer has one of its own."""
        return self.layers[layer]


def _n_dense(read: ConfigReader, n_layers: int, defaults: Defaults) -> int:
    """Return how many leading layers are dense, from either spelling."""
    kinds = read.raw.get("mlp_layer_types")
    if kinds is None or read.raw.get("first_k_dense_replace") is not None:
        return read.size("first_k_dense_replace", defaults.dense, least=0)
    n_dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense):
        raise read.bad("mlp_layer_types", f"'dense' for the first layers, then 'sparse', {n_layers} in all")
    return n_dense


def _read_groups(
    read: ConfigReader, n_experts: int, method: str, defaults: Defaults
) -> tuple[int | None, int | None]:
    """Return n_group and topk_group, both or neither, after checking that experts divide into them."""
    default_group, default_topk = defaults.groups or (None, None)
    n_group = read.size_or_null("n_group", default_group)
    topk_group = read.size_or_null("topk_group", default_topk)
    if method == "greedy":
        return (n_group, topk_group) if n_group and topk_group else (None, None)
    # noaux_tc adds up the two best experts of a group, so it needs two in each.
    least = 2 if method == "noaux_tc" and n_group != 1 else 1
    if n_group is None or n_experts % n_group or n_experts // n_group < least:
        raise read.bad(
            "n_group", f"a divisor of n_routed_experts ({n_experts}) with {least} or more experts a group"
        )
    if topk_group is None or topk_group > n_group:
        raise read.bad("topk_group", f"1 to n_group ({n_group})")
    return n_group, topk_group


def _read_rope(raw: Mapping[str, Any], path: str | Path, context: int) -> tuple[float, Yarn | None]:
    """Return the base frequency and the scaling, from either spelling."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(key) or {}
    if not isinstance(rope, dict):
        raise BadConfig(f"{path}: {key} is {shown(rope)}, expected an object or null")
    beside = ConfigReader(raw, path)
    read = ConfigReader(rope, path, prefix=f"{key}.")
    theta = read.number("rope_theta", beside.number("rope_theta", 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise UnsupportedCheckpoint(
            f"{path}: {key}: RoPE of type {shown(kind)}, expected 'default' or 'yarn'"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise read.bad("partial_rotary_factor", "1.0")
    return theta, Yarn(
        factor=read.number("factor"),
        original_context=read.size("original_max_position_embeddings", context),
        beta_fast=read.number("beta_fast", 32.0),
        beta_slow=read.number("beta_slow", 1.0),
        mscale=read.number_or_null("mscale"),
        mscale_all_dim=read.number_or_null("mscale_all_dim"),
        attention_factor=read.number_or_null("attention_factor"),
    )
