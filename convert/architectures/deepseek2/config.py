"""DeepseekConfig: what config.json says about a DeepSeek V2 or V3 model or a relative, checked and complete.

A missing size is an error. Where config.json doesn't say how the model computes, it computes as
transformers does for that architecture: Defaults. A value that the architecture doesn't compute with
(softmax for V3, say) is an error: transformers would ignore it, and no GGUF key can express what was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from convert.architectures.config_reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader
from convert.architectures.decoder.config import DecoderConfig, leading_dense_layers
from convert.architectures.decoder.rope import RopeConfig, Yarn, read_rope

V2 = "DeepseekV2ForCausalLM"
V3 = "DeepseekV3ForCausalLM"


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
    index_heads       index_n_heads, of architectures with an indexer, as in transformers 5.23
    may_share         whether their layers may use the choice of a layer before them
    activation        the one value of hidden_act
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
    index_heads: int = 64
    may_share: bool = False
    activation: str = "silu"


DEFAULTS: Mapping[str, Defaults] = MappingProxyType(
    {
        V2: Defaults(("softmax",), ("greedy", "group_limited_greedy"), False, 1.0, None, 0),
        V3: Defaults(),
    }
)
"""Architecture -> its defaults: those of transformers' classes (5.23)."""

_FIXED: Mapping[str, tuple[Any, str]] = {
    "attention_bias": (False, "llama.cpp's deepseek2 has no attention biases"),
    "mlp_bias": (False, "llama.cpp's deepseek2 has no feed-forward biases"),
    "rope_interleave": (True, "llama.cpp's deepseek2 rotates neighbouring pairs"),
    "moe_layer_freq": (1, "every layer after the leading dense ones is a mixture of experts"),
    "partial_rotary_factor": (1.0, "qk_rope_head_dim is rotated as a whole"),
}
"""Keys with only one possible value, also when missing -> (value, why)."""


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """Configuration of a model; names as in config.json, or as other decoders have them.

    architecture     what config.json calls it
    head_dim         columns of a head's query and key: qk_nope_head_dim, then the rotated qk_rope_head_dim
    q_lora_rank      None when queries are not compressed
    num_experts      0 for a model whose layers are all dense
    n_group          None when experts are not grouped
    norm_topk_prob   whether the model normalises the weights of the chosen experts (never for V2)
    norm_requested   what config.json says about it, whether or not the architecture obeys
    lengths_first    whether llama.cpp's converter sees a head_dim: it writes the lengths of keys and values
                     among the first keys then
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    v_head_dim: int
    topk_method: str
    scoring_func: str
    norm_requested: bool
    num_nextn_predict_layers: int
    lengths_first: bool = True

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        path: str | Path = "config.json",
        defaults_of: Mapping[str, Defaults] = DEFAULTS,
    ) -> DeepseekConfig:
        """Return the configuration in `raw`, the content of `path`.

        defaults_of  architecture -> what holds where config.json says nothing; one of them it must be
        raises       BadConfig naming file and key for a missing or impossible value,
                     UnsupportedCheckpoint for what llama.cpp's deepseek2 does not compute
        """
        return cls(**deepseek_fields(ConfigReader(raw, path), defaults_of))

    @property
    def n_routed_experts(self) -> int:
        return self.num_experts

    @property
    def yarn(self) -> Yarn | None:
        """None for plain RoPE."""
        return self.rope.yarn

    @property
    def qk_rope_head_dim(self) -> int:
        return self.rotated_cols

    @property
    def qk_nope_head_dim(self) -> int:
        return self.head_dim - self.rotated_cols

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
    def indexer(self) -> Indexer | None:
        """Indexer that chooses the positions that tokens attend to; None where they attend to all."""
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
    """Indexer that chooses the positions that tokens attend to.

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


def deepseek_fields(
    read: ConfigReader, defaults_of: Mapping[str, Defaults], *, rotates: bool = True
) -> dict[str, Any]:
    """Return the fields of DeepseekConfig; see its `from_dict`.

    rotates  whether heads have rotated columns
    """
    architecture = read.architecture(defaults_of)
    defaults = defaults_of[architecture]
    read.fixed("hidden_act", defaults.activation, "llama.cpp has no other activation for this architecture")
    for key, (value, why) in _FIXED.items():
        read.fixed(key, value, why)
    heads = read.size("num_attention_heads")
    if read.raw.get("num_key_value_heads") not in (None, heads):
        raise read.bad(
            "num_key_value_heads", f"{heads} (num_attention_heads): every head has keys of its own"
        )
    context = read.size("max_position_embeddings")
    rope = _read_rope(read, context)
    rotated = read.size("qk_rope_head_dim", least=int(rotates))
    mtp_key = "num_mtp_layers" if "num_mtp_layers" in read.raw else "num_nextn_predict_layers"
    read.overruled("num_nextn_predict_layers")
    return {
        "architecture": architecture,
        "vocab_size": read.size("vocab_size"),
        "hidden_size": read.size("hidden_size"),
        "intermediate_size": read.size("intermediate_size"),
        "num_hidden_layers": read.size("num_hidden_layers", most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": read.size_or_null("q_lora_rank"),
        "kv_lora_rank": read.size("kv_lora_rank"),
        "head_dim": read.size("qk_nope_head_dim") + rotated,
        "stated_head_dim": None,
        "rotated_cols": rotated,
        "v_head_dim": read.size("v_head_dim"),
        **_expert_fields(read, defaults),
        "rms_norm_eps": read.number("rms_norm_eps", defaults.eps),
        "max_position_embeddings": context,
        "rope": rope,
        "tie_word_embeddings": read.flag("tie_word_embeddings", defaults.tied),
        "num_nextn_predict_layers": read.size(mtp_key, 0, least=0, most=MAX_LAYERS),
        # transformers 4.57, which that converter reads config.json with, knows these two alone.
        "lengths_first": "head_dim" in read.raw
        or (architecture in (V2, V3) and read.raw.get("model_type") in ("deepseek_v2", "deepseek_v3")),
    }


def _expert_fields(read: ConfigReader, defaults: Defaults) -> dict[str, Any]:
    """Return the fields of DeepseekConfig about experts, of which a model may have none."""
    n_layers = read.size("num_hidden_layers", most=MAX_LAYERS)
    method = read.choice("topk_method", defaults.methods)
    stated = {
        "topk_method": method,
        "scoring_func": read.choice("scoring_func", defaults.scoring),
        "routed_scaling_factor": read.number("routed_scaling_factor", defaults.scale),
    }
    if not defaults.experts and read.raw.get("n_routed_experts") is None:
        return {
            **stated,
            "num_experts": 0,
            "num_shared_experts": 0,
            "num_experts_per_tok": 0,
            "moe_intermediate_size": read.size("intermediate_size"),
            "first_k_dense_replace": n_layers,
            "n_group": None,
            "topk_group": None,
            "norm_topk_prob": False,
            "norm_requested": False,
        }
    n_experts = read.size("n_routed_experts", most=MAX_EXPERTS)
    norm_requested = read.flag("norm_topk_prob", defaults.normalises)
    n_group, topk_group = _read_groups(read, n_experts, method, defaults)
    return {
        **stated,
        "num_experts": n_experts,
        "num_shared_experts": read.size("n_shared_experts"),
        "num_experts_per_tok": read.size("num_experts_per_tok", most=n_experts),
        "moe_intermediate_size": read.size("moe_intermediate_size"),
        "first_k_dense_replace": leading_dense_layers(read, n_layers, defaults.dense),
        "n_group": n_group,
        "topk_group": topk_group,
        "norm_topk_prob": defaults.normalises and norm_requested,
        "norm_requested": norm_requested,
    }


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


def _read_rope(read: ConfigReader, context: int) -> RopeConfig:
    """Return the rotation, from either spelling."""
    rope = read_rope(read, context, kinds=("default", "yarn"))
    if rope.kind == "yarn" and rope.partial not in (None, 1.0):
        raise read.bad("partial_rotary_factor", "1.0")
    return replace(rope, partial=None)
