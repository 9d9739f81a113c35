"""Small checkpoints of Kimi Linear; see tests/support/published_models.py."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.published_checkpoint import Published
from tests.support.published_shapes import Config, Shapes, latent

_LINEAR: Config = {
    "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "model_max_length": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False, "dtype": "bfloat16",
    "vocab_size": 576, "bos_token_id": 556, "eos_token_id": 557, "head_dim": 12, "q_lora_rank": None,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "mla_use_nope": True,
    "moe_intermediate_size": 32, "moe_layer_freq": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "num_experts": 6, "num_experts_per_token": 2,
    "num_shared_experts": 1, "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True,
    "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "linear_attn_config": {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 16, "num_heads": 4,
                           "short_conv_kernel_size": 4},
}  # fmt: skip


def kimi_linear(config: Config) -> Shapes:
    """Yield the tensors of a Kimi Linear: layers of KDA in place of some of those of DeepSeek V3."""
    net, hidden, heads = config["linear_attn_config"], config["hidden_size"], config["num_attention_heads"]
    cols, size = net["head_dim"], net["short_conv_kernel_size"]
    sizes = {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    for name, shape in latent({**config, **sizes}):
        at, _, of_attention = name.partition(".self_attn.")
        if of_attention and int(at.rpartition(".")[2]) + 1 in net["kda_layers"]:
            if of_attention == "o_proj.weight":
                yield from _kimi_delta(f"{at}.self_attn", hidden, heads, cols, size)
        else:
            for ours, published in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
                if ".experts." in name:
                    name = name.replace(f"{ours}_proj", published)
            dense = f"layers.{config['first_k_dense_replace'] - 1}.mlp"
            yield name if dense in name else name.replace(".mlp.", ".block_sparse_moe."), shape


def _kimi_delta(prefix: str, hidden: int, heads: int, cols: int, size: int) -> Shapes:
    for part in "qkv":
        yield f"{prefix}.{part}_proj.weight", (heads * cols, hidden)
        yield f"{prefix}.{part}_conv1d.weight", (heads * cols, 1, size)
    yield f"{prefix}.A_log", (1, 1, heads, 1)
    yield f"{prefix}.dt_bias", (heads * cols,)
    yield f"{prefix}.b_proj.weight", (heads, hidden)
    for gate in "fg":
        yield f"{prefix}.{gate}_a_proj.weight", (cols, hidden)
        yield f"{prefix}.{gate}_b_proj.weight", (heads * cols, cols)
    yield f"{prefix}.o_norm.weight", (cols,)
    yield f"{prefix}.o_proj.weight", (hidden, heads * cols)


KIMI_MODELS: Mapping[str, Published] = {
    "kimi-linear": Published(
        {**_LINEAR, "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"},
        kimi_linear, "llama-r1-distill",
    ),
}  # fmt: skip
