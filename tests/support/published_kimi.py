"""Small checkpoints of Kimi Linear and Kimi K3; see tests/support/published_models.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.checkpoints import Tensors
from tests.support.published_checkpoint import Published
from tests.support.published_shapes import Config, Shapes, latent
from tests.support.scaled_packers import mxfp4

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
                yield from kimi_delta(f"{at}.self_attn", hidden, heads, cols, size)
        else:
            for ours, published in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
                if ".experts." in name:
                    name = name.replace(f"{ours}_proj", published)
            dense = f"layers.{config['first_k_dense_replace'] - 1}.mlp"
            yield name if dense in name else name.replace(".mlp.", ".block_sparse_moe."), shape


def kimi_delta(prefix: str, hidden: int, heads: int, cols: int, size: int) -> Shapes:
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


def kimi_k3(config: Config) -> Shapes:
    """Yield the tensors of a Kimi K3: those of a Kimi Linear, with other gates and experts, and scores."""
    hidden, cols, latent_layers = config["hidden_size"], config["routed_expert_hidden_size"], _full(config)
    for name, shape in kimi_linear(config):
        head, _, part = name.rpartition(".self_attn.")
        if part == "A_log":
            shape = (config["num_attention_heads"],)
        elif part == "g_a_proj.weight":
            continue
        elif part == "g_b_proj.weight":
            yield f"{head}.self_attn.g_proj.weight", (shape[0], hidden)
            continue
        elif part == "kv_b_proj.weight" and head in latent_layers:
            heads = config["num_attention_heads"] * config["v_head_dim"]
            yield f"{head}.self_attn.g_proj.weight", (heads, hidden)
        elif ".experts." in name:
            shape = (shape[0], cols) if shape[1] == hidden else (cols, shape[1])
        elif name.endswith("block_sparse_moe.gate.weight"):
            moe = name.removesuffix(".gate.weight")
            yield f"{moe}.routed_expert_down_proj.weight", (cols, hidden)
            yield f"{moe}.routed_expert_up_proj.weight", (hidden, cols)
            yield f"{moe}.routed_expert_norm.weight", (cols,)
        elif name.endswith(".input_layernorm.weight"):
            for res in ("self_attention_res", "mlp_res"):
                yield from _score(f"{name.removesuffix('.input_layernorm.weight')}.{res}", hidden)
        yield name, shape
    yield from _score("model.output_attn_res", hidden)


def _full(config: Config) -> list[str]:
    return [f"model.layers.{number - 1}" for number in config["linear_attn_config"]["full_attn_layers"]]


def _score(prefix: str, hidden: int) -> Shapes:
    yield f"{prefix}_norm.weight", (hidden,)
    yield f"{prefix}_proj.weight", (1, hidden)


def _packed(tensors: Tensors) -> Tensors:
    """Return the tensors with routed experts in MXFP4."""
    stored: Tensors = {}
    for name, weight in tensors.items():
        if ".experts." in name:
            parts, _ = mxfp4(weight.astype(np.float32))
            stored |= {name.removesuffix(".weight") + part: values for part, values in parts.items()}
        else:
            stored[name] = weight
    return stored


_K3: Config = {
    **_LINEAR, "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "q_lora_rank": 48,
    "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2, "routed_expert_hidden_size": 32, "moe_renormalize": True,
    "linear_attn_config": {**_LINEAR["linear_attn_config"], "gate_lower_bound": -5.0},
}  # fmt: skip
_MXFP4 = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed", "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
    }}},
}  # fmt: skip
_AROUND: Config = {
    "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3",
    "vision_config": {"model_type": "moonvit"}, "eos_token_id": 557,
}  # fmt: skip
_BESIDE: dict[str, Any] = {
    "around": _AROUND, "prefix": "language_model.",
    "extra": {"vision_tower.patch_embed.proj.weight": (8, 8), "mm_projector.proj.0.weight": (8, 8)},
}  # fmt: skip

KIMI_MODELS: Mapping[str, Published] = {
    "kimi-linear": Published(
        {**_LINEAR, "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"},
        kimi_linear, "llama-r1-distill",
    ),
    "kimi-k3": Published(
        {**_K3, "quantization_config": _MXFP4}, kimi_k3, "llama-r1-distill", _packed, **_BESIDE
    ),
    "kimi-k3-bf16": Published({**_K3, "head_dim": None}, kimi_k3, "llama-r1-distill", **_BESIDE),
}  # fmt: skip
