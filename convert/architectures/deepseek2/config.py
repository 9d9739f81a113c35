"""DeepseekConfig: what config.json says about a DeepSeek V2 or V3 model, checked and complete.

Two spellings are read: `rope_scaling` with `type` and `rope_theta` beside it (the published models), and
`rope_parameters` with `rope_type` and `rope_theta` inside it (transformers 5). Where both stand,
transformers takes `rope_scaling`, and so do we.

A missing size is an error. Where config.json doesn't say how the model computes, it computes as
transformers does for that architecture:

                          DeepseekV2ForCausalLM        DeepseekV3ForCausalLM
    scoring_func          softmax                      sigmoid
    topk_method           greedy                       noaux_tc (the selection bias picks, the score weighs)
    norm_topk_prob        not used, never normalised   true
    routed_scaling_factor 1.0                          2.5
    n_group, topk_group   none                         8, 4
    first_k_dense_replace 0                            3

A value that the architecture doesn't compute with (softmax for V3, say) is an error: transformers would
ignore it, and no GGUF key can express what was meant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.architectures.config_reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader, shown
from gguf_tools.errors import BadConfig, UnsupportedCheckpoint

V2 = "DeepseekV2ForCausalLM"
V3 = "DeepseekV3ForCausalLM"

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

    architecture     V2 or V3
    q_lora_rank      None when queries are not compressed
    n_group          None when experts are not grouped
    norm_topk_prob   whether the model normalises the weights of the chosen experts (never for V2)
    norm_requested   what config.json says about it, whether or not the architecture obeys
    yarn             None for plain RoPE
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

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], path: str | Path = "config.json") -> DeepseekConfig:
        """Return the configuration in `raw`, the content of `path`.

        raises  BadConfig naming file and key for a missing or impossible value,
                UnsupportedCheckpoint for what llama.cpp's deepseek2 does not compute
        """
        read = ConfigReader(raw, path)
        architecture = read.architecture((V2, V3))
        is_v3 = architecture == V3
        for key, (value, why) in _FIXED.items():
            read.fixed(key, value, why)
        heads = read.size("num_attention_heads")
        if raw.get("num_key_value_heads") not in (None, heads):
            raise read.bad(
                "num_key_value_heads", f"{heads} (num_attention_heads): every head has keys of its own"
            )
        n_experts = read.size("n_routed_experts", most=MAX_EXPERTS)
        norm_requested = read.flag("norm_topk_prob", is_v3)
        context = read.size("max_position_embeddings")
        theta, yarn = _read_rope(raw, path, context)
        n_layers = read.size("num_hidden_layers", most=MAX_LAYERS)
        topk_method = read.choice(
            "topk_method", ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
        )
        n_group, topk_group = _read_groups(read, n_experts, topk_method, is_v3)
        return cls(
            architecture=architecture,
            vocab_size=read.size("vocab_size"),
            hidden_size=read.size("hidden_size"),
            intermediate_size=read.size("intermediate_size"),
            moe_intermediate_size=read.size("moe_intermediate_size"),
            num_hidden_layers=n_layers,
            num_attention_heads=heads,
            q_lora_rank=read.size_or_null("q_lora_rank"),
            kv_lora_rank=read.size("kv_lora_rank"),
            qk_nope_head_dim=read.size("qk_nope_head_dim"),
            qk_rope_head_dim=read.size("qk_rope_head_dim"),
            v_head_dim=read.size("v_head_dim"),
            n_routed_experts=n_experts,
            n_shared_experts=read.size("n_shared_experts"),
            num_experts_per_tok=read.size("num_experts_per_tok", most=n_experts),
            first_k_dense_replace=read.size("first_k_dense_replace", 3 if is_v3 else 0, least=0),
            n_group=n_group,
            topk_group=topk_group,
            topk_method=topk_method,
            scoring_func=read.choice("scoring_func", ("sigmoid",) if is_v3 else ("softmax",)),
            norm_topk_prob=is_v3 and norm_requested,
            norm_requested=norm_requested,
            routed_scaling_factor=read.number("routed_scaling_factor", 2.5 if is_v3 else 1.0),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            max_position_embeddings=context,
            rope_theta=theta,
            yarn=yarn,
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
            num_nextn_predict_layers=read.size(
                "num_mtp_layers" if "num_mtp_layers" in raw else "num_nextn_predict_layers",
                0,
                least=0,
                most=MAX_LAYERS,
            ),
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
    def expert_groups(self) -> tuple[int, int] | None:
        """How many groups of experts, and how many may be used; (1, 1) where the choice isn't restricted."""
        if self.n_group is None or self.topk_group is None:
            return None
        if self.topk_method == "greedy" or self.topk_group == self.n_group:
            return 1, 1
        return self.n_group, self.topk_group


def _read_groups(
    read: ConfigReader, n_experts: int, method: str, is_v3: bool
) -> tuple[int | None, int | None]:
    """Return n_group and topk_group, both or neither, after checking that experts divide into them."""
    n_group = read.size_or_null("n_group", 8 if is_v3 else None)
    topk_group = read.size_or_null("topk_group", 4 if is_v3 else None)
    if method == "greedy":
        return (n_group, topk_group) if n_group and topk_group else (None, None)
    # noaux_tc adds up the two best experts of a group, so it needs two in each.
    least = 2 if is_v3 and n_group != 1 else 1
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
