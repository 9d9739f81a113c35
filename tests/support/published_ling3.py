"""Small checkpoints of Ling 3, and their shapes; see tests/support/published_models.py."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.published_checkpoint import COMMON, Published
from tests.support.published_shapes import Config, Shapes, latent


def ling3(config: Config) -> Shapes:
    """Yield the tensors of a Ling 3: layers of KDA in place of all but the last of a group of DeepSeek's."""
    hidden, heads, cols = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    sizes = {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    for name, shape in latent({**config, **sizes}):
        name = name.replace("model.embed_tokens", "model.word_embeddings")
        name = name.replace("gate.e_score_correction_bias", "gate.expert_bias")
        layer, _, part = name.partition(".self_attn.")
        if ".shared_head." in name or name.endswith(".embed_tokens.weight"):
            if name.endswith("norm.weight"):
                yield name.replace("shared_head.norm", "final_layernorm"), shape
        elif not part:
            yield name, shape
        elif has_latent_attention(config, int(layer.rpartition(".")[2])):
            yield f"{layer}.attention.{part}".replace("o_proj", "dense"), shape
            if part == "o_proj.weight":
                yield f"{layer}.attention.g_proj.weight", (heads, hidden)
        elif part == "o_proj.weight":
            for each in ("q_proj", "k_proj", "v_proj", "f_proj", "g_proj"):
                yield f"{layer}.attention.{each}.weight", (heads * cols, hidden)
            for each in "qkv":
                yield f"{layer}.attention.{each}_conv1d.weight", (heads * cols, 1, 4)
            yield f"{layer}.attention.A_log", (heads,)
            yield f"{layer}.attention.dt_bias", (heads * cols,)
            yield f"{layer}.attention.b_proj.weight", (heads, hidden)
            yield f"{layer}.attention.o_norm.weight", (cols,)
            yield f"{layer}.attention.o_proj.weight", (hidden, heads * cols)


def has_latent_attention(config: Config, layer: int) -> bool:
    group, n_layers = config["layer_group_size"], config["num_hidden_layers"]
    return (layer + 1) % group == 0 or layer >= n_layers // group * group


_LING3: Config = {
    **COMMON, "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid",
    "num_hidden_layers": 5, "layer_group_size": 2, "head_dim": 16, "q_lora_rank": None, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "rope_theta": 6000000.0,
    "short_conv_kernel_size": 4, "no_kda_lora": True, "kda_safe_gate": True, "kda_lower_bound": -5.0,
    "gated_attention_proj_granularity_type": "head_wise", "num_experts": 8, "num_experts_per_tok": 2,
    "num_shared_experts": 1, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "partial_rotary_factor": 0.5, "rope_scaling": None, "num_nextn_predict_layers": 1, "use_bias": False,
    "use_qkv_bias": False,
}  # fmt: skip

LING3_MODELS: Mapping[str, Published] = {
    "ling-3-flash": Published(
        {**_LING3, "expert_swiglu_limit_list": [None, None, 2.0, 0, 1.5, None],
         "share_expert_swiglu_limit_list": [0.5, None, None, 1.0]},
        ling3, "llama-r1-distill",
    ),
    "ling-3-tiny": Published(
        {**_LING3, "num_hidden_layers": 4, "q_lora_rank": 48, "n_group": 1, "topk_group": 1,
         "num_nextn_predict_layers": 0},
        ling3, "llama-r1-distill",
    ),
}  # fmt: skip
