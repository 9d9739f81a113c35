"""Small random models of ordinary decoders, made and saved by transformers, with a tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parents[1] / "golden" / "arch" / "models"

_SIZES: dict[str, Any] = {
    "vocab_size": 576, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip

_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.125,
    "logits_scaling": 8.0,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_chunk_size": 16,
}  # fmt: skip
_NEMOTRON: dict[str, Any] = {
    "head_dim": 32, "mamba_num_heads": 12, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
    "chunk_size": 16,
}  # fmt: skip
_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_QWEN_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16,
    "tie_word_embeddings": True, "eos_token_id": 1, "bos_token_id": 2, "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 64, "num_position_embeddings": 16,
}  # fmt: skip
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
_QUARTER: dict[str, Any] = {
    "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
}  # fmt: skip
_NO_EPSILON = {"rms_norm_eps": 1e-20}
"""As llama.cpp computes where it reads none."""
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}

_LING3: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_group_size": 2, "num_key_value_heads": 4, "head_dim": 16,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_group": 4, "topk_group": 2,
}  # fmt: skip
_GLM5_NEXT: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "index_topk": 16, "index_kpool": 4,
    "mlp_layer_types": ["dense", *["sparse"] * 3], "index_head_dim": 64, "index_n_heads": 32,
    "rms_norm_eps": 1e-6, "vision_config": {**_VISION, "num_heads": 2},
}  # fmt: skip
_MINIMAX_M3: dict[str, Any] = {
    **_EXPERTS, "num_hidden_layers": 3, "head_dim": 32, "intermediate_size": 32, "rotary_dim": 16,
    "dense_intermediate_size": 96, "shared_intermediate_size": 32, "index_n_heads": 2, "index_head_dim": 32,
    "index_block_size": 16, "index_topk_blocks": 32,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
_ALPHA: dict[str, Any] = {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 1e4, "alpha": 1000.0}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("Llama", {"attention_bias": True}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "head_dim": 24},
    ),
    "llama-yarn": (
        "Llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                             "original_max_position_embeddings": 128}},
    ),
    "llama-yarn-factor": (
        "Llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "attention_factor": 0.9,
                             "original_max_position_embeddings": 32}},
    ),
    "qwen3-yarn-mscales": (
        "Qwen3",
        {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "mscale": 0.7,
                             "mscale_all_dim": 1.2, "original_max_position_embeddings": 32}},
    ),
    "olmo2-tied": ("Olmo2", {"tie_word_embeddings": True}),
    "granite-llama3": (
        "Granite",
        {**_GRANITE, "rope_parameters": _LLAMA3},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "mixtral": ("Mixtral", {**_EXPERTS, "num_key_value_heads": 4}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 1}),
    "qwen3moe": (
        "Qwen3Moe",
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16,
         "norm_topk_prob": True},
    ),
    "qwen2moe": ("Qwen2Moe", {**_QWEN_EXPERTS, "norm_topk_prob": False}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 32, "rope_parameters": _ALPHA}),
    "hunyuanmoe": (
        "HunYuanMoEV1", {"head_dim": 16, "num_experts": 6, "moe_topk": 2, "rope_parameters": _ALPHA},
    ),
    "hy-v3": (
        "HYV3", {"num_hidden_layers": 3, "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 32, "num_shared_experts": 1, "router_scaling_factor": 2.5},
    ),
    "solar-open": (
        "SolarOpen",
        {"head_dim": 32, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "n_shared_experts": 1, "routed_scaling_factor": 1.5, "intermediate_size": 96},
    ),
    "glm4": ("Glm4", {"head_dim": 32, "attention_bias": True, "pad_token_id": 0}),
    "glm4v": (
        "Glm4v",
        {"vision_config": _VISION,
         "rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    ),
    "exaone4": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True,
         "rope_parameters": _LLAMA3},
    ),
    "exaone4-windows": (
        "Exaone4",
        {"num_hidden_layers": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 16, "rope_parameters": _LLAMA3},
    ),
    "exaone-moe": (
        "ExaoneMoe",
        {"num_hidden_layers": 4, "head_dim": 32, "sliding_window": 16, "num_experts": 8,
         "num_experts_per_tok": 2, "num_shared_experts": 2, "moe_intermediate_size": 32, "n_group": 4,
         "topk_group": 2, "rope_parameters": _LLAMA3},
    ),
    "ernie4.5": ("Ernie4_5", {"head_dim": 32, "tie_word_embeddings": True}),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        {"num_hidden_layers": 3, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32,
         "moe_num_shared_experts": 2},
    ),
    "glm4moe-normed": (
        "Glm4Moe",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32,
         "n_shared_experts": 2, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5,
         "num_mtp_layers": 0, "first_k_dense_replace": 1},
    ),
    "gpt-oss": (
        "GptOss",
        {**_EXPERTS, "head_dim": 16, "sliding_window": 16,
         "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "rope_theta": 150000.0, "truncate": True,
                             "original_max_position_embeddings": 4096}},
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {**_EXPERTS, "head_dim": 32, "rotary_dim": 16,
         "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}},
    ),
    "apertus": ("Apertus", {"head_dim": 32, "rope_parameters": _LLAMA3}),
    "llama4": (
        "Llama4",
        {**_EXPERTS, "num_hidden_layers": 4, "head_dim": 32, "intermediate_size_mlp": 160,
         "interleave_moe_layer_step": 2, "rope_parameters": _LLAMA3},
    ),
    "minimax-m3": ("MiniMaxM3VL", _MINIMAX_M3),
    "starcoder2": ("Starcoder2", {"num_hidden_layers": 3}),
    "seed-oss": ("SeedOss", {"head_dim": 32}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {"num_hidden_layers": 4, "sliding_window": 16,
         "rope_parameters": {
             "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0,
                                "original_max_position_embeddings": 64},
             "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}},
    ),
    "granite": ("Granite", _GRANITE),
    "granitemoe": ("GraniteMoe", {**_GRANITE, **_EXPERTS}),
    "granitemoeshared": ("GraniteMoeShared", {**_GRANITE, **_EXPERTS, "shared_intermediate_size": 48}),
    "granite4": (
        "GraniteMoeHybrid",
        {**_GRANITE, **_MAMBA, "num_local_experts": 0, "num_experts_per_tok": 0,
         "shared_intermediate_size": 96, "layer_types": ["full_attention"] * 2,
         "position_embedding_type": "rope"},
    ),
    "granite4-h": (
        "GraniteMoeHybrid",
        {**_GRANITE, **_MAMBA, **_EXPERTS, "shared_intermediate_size": 48, "num_hidden_layers": 4,
         "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    ),
    "nemotron-h": (
        "NemotronH",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention",
                                            "mlp"]},
    ),
    "nemotron-3": (
        "NemotronH",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
         "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5},
    ),
    "nemotron-3-super": (
        "NemotronH",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
         "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_latent_size": 48,
         "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5},
    ),
    "phi4": ("Phi3", {"pad_token_id": 0}),
    "phi4-mini": (
        "Phi3",
        {"tie_word_embeddings": True, "pad_token_id": 0, "max_position_embeddings": 512,
         "original_max_position_embeddings": 40, "head_dim": 16,
         "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
                             "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8],
                             "long_factor": [1.0, 1.5, 3.0, 8.0, 20.0, 40.0]}},
    ),
    "ministral3": (
        "Ministral3",
        {"head_dim": 32,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
                             "llama_4_scaling_beta": 0.1}},
    ),
    "laguna": (
        "Laguna",
        {"num_hidden_layers": 4, "head_dim": 32, "num_attention_heads_per_layer": [4, 6, 6, 6],
         "layer_types": ["full_attention", *["sliding_attention"] * 3], "sliding_window": 16,
         "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 48, "moe_routed_scaling_factor": 2.5,
         "rope_parameters": {
             "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0,
                                "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}},
    ),
    "laguna-by-column": (
        "Laguna",
        {"head_dim": 32, "gating": "per-element", "num_experts": 6, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0}}},
    ),
    "muse-glimmer": (
        "MuseGlimmer",
        {"num_hidden_layers": 4, "head_dim": 32, "sliding_window": 16, "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
            "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4}},
    ),
    "mimo-v2-flash": (
        "MiMoV2Flash",
        {"num_hidden_layers": 4, "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 6,
         "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 16,
         "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]},
    ),
    "step3.7": (
        "Step3p7",
        {"num_hidden_layers": 4, "head_dim": 32, "n_routed_experts": 6, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "share_expert_dim": 48, "moe_router_scaling_factor": 3.0,
         "sliding_window": 16, "num_sliding_attention_heads": 6,
         "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
         "mlp_layer_types": ["dense", *["sparse"] * 3],
         "swiglu_limits": [0.0, 0.0, 0.03, None], "swiglu_limits_shared": [0.0, 0.04, 0.0, 0.05],
         "rope_parameters": {
             "full_attention": {"rope_type": "llama3", "rope_theta": 5e6, "partial_rotary_factor": 0.5,
                                "factor": 2.0, "original_max_position_embeddings": 64,
                                "low_freq_factor": 1.0, "high_freq_factor": 32.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
         "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                           "image_size": 28, "patch_size": 14}},
    ),
    "gemma2": (
        "Gemma2",
        {"num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
         "eos_token_id": 1, "bos_token_id": 2},
    ),
    "gemma3": (
        "Gemma3",
        {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16,
         "tie_word_embeddings": True, "eos_token_id": 1, "bos_token_id": 2,
         "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    "gemma3n": (
        "Gemma3n",
        {"num_hidden_layers": 22, "num_kv_shared_layers": 2, "head_dim": 16, "sliding_window": 16,
         "intermediate_size": 512, "vocab_size_per_layer_input": 560, "tie_word_embeddings": True,
         "eos_token_id": 1, "bos_token_id": 2,
         "layer_types": [*[*["sliding_attention"] * 4, "full_attention"] * 4, "sliding_attention",
                         "full_attention"]},
    ),
    "gemma4": ("Gemma4", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-experts": (
        "Gemma4", {**_GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
                   "moe_intermediate_size": 32},
    ),
    "gemma4-small": (
        "Gemma4", {**_GEMMA4, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2,
                   "vocab_size_per_layer_input": 576, "use_double_wide_mlp": True},
    ),
    "qwen3next": ("Qwen3Next", {**_DELTA_NET, **_QWEN_EXPERTS, "norm_topk_prob": True}),
    "qwen35": ("Qwen3_5", {**_DELTA_NET, "linear_num_value_heads": 6}),
    "qwen35-ungrouped": ("Qwen3_5", {**_DELTA_NET, "linear_num_value_heads": 2, "tie_word_embeddings": True}),
    "qwen35moe": ("Qwen3_5Moe", {**_DELTA_NET, **_QWEN_EXPERTS}),
    "qwen4exp": (
        "Qwen4Exp",
        {**_DELTA_NET, **_QWEN_EXPERTS, "hc_count": 2, "hc_lowrank": 16, "ple_layer_ids": [2],
         "heads_per_ngram": 2, "ngram_vocab_size_base": 61, "split_ngram_parts": 4, "indexer_n_heads": 2,
         "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 512, "indexer_compress_ratio": 4,
         "output_gate_type": "sigmoid", "rope_parameters": _QUARTER},
    ),
    "qwen4exp-blocks": (
        "Qwen4Exp",
        {**_DELTA_NET, **_QWEN_EXPERTS, "hc_count": 3, "hc_lowrank": 16, "indexer_n_heads": 8,
         "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 24, "indexer_compress_ratio": 4,
         "output_gate_type": "sigmoid", "rope_parameters": _QUARTER},
    ),
    "qwen2vl": (
        "Qwen2VL",
        {**_NO_EPSILON, "vision_config": {**_VISION, "embed_dim": 32}, "rope_parameters": _MROPE},
    ),
    "qwen2.5vl": ("Qwen2_5_VL", {**_NO_EPSILON, "vision_config": _VISION, "rope_parameters": _MROPE}),
    "qwen3vl": (
        "Qwen3VL",
        {"head_dim": 32, "rope_parameters": {**_MROPE, "mrope_section": [6, 5, 5]},
         "vision_config": {**_VISION, "deepstack_visual_indexes": [0]}},
    ),
    "qwen3vlmoe": (
        "Qwen3VLMoe",
        {"head_dim": 32, "rope_parameters": {**_MROPE, "mrope_section": [6, 5, 5]},
         "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
         "vision_config": {**_VISION, "deepstack_visual_indexes": []}},
    ),
    "kimi-linear": (
        "KimiLinear",
        {"num_hidden_layers": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
         "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32, "num_experts": 6,
         "num_experts_per_token": 2, "rms_norm_eps": 1e-6, "linear_attn_config": {
             "full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 16, "num_heads": 4,
             "short_conv_kernel_size": 4}},
    ),
    "glm5-next": ("Glm5Next", _GLM5_NEXT),
    "glm5-next-shared": (
        "Glm5Next",
        {**_GLM5_NEXT, "layer_types": ["linear_attention", *["full_attention"] * 2, "linear_attention"],
         "indexer_types": ["full", "full", "shared", "full"]},
    ),
    "ling3-groups": ("BailingHybrid", _LING3),
    "ling3-compressed": ("BailingHybrid", {**_LING3, "q_lora_rank": 24, "n_group": 1, "topk_group": 1}),
    "cohere2": (
        "Cohere2",
        {"num_hidden_layers": 5, "sliding_window": 16, "tie_word_embeddings": True, "logit_scale": 0.25},
    ),
    "cohere2moe": (
        "Cohere2Moe",
        {"num_hidden_layers": 6, "sliding_window": 16, "head_dim": 16, "num_experts": 5,
         "num_experts_per_tok": 2, "num_shared_experts": 2, "expert_selection_fn": "sigmoid",
         "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 160, "logit_scale": 0.5},
    ),
    "lfm2": (
        "Lfm2",
        {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "block_multiple_of": 32,
         "tie_word_embeddings": True},
    ),
    "lfm2moe": (
        "Lfm2Moe",
        {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_experts": 6,
         "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_dense_layers": 1},
    ),
    "falcon-h1": (
        "FalconH1",
        {"num_hidden_layers": 2, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_n_groups": 2,
         "mamba_d_head": 16, "mamba_d_state": 16, "embedding_multiplier": 2.5, "lm_head_multiplier": 0.4,
         "attention_in_multiplier": 0.7, "attention_out_multiplier": 0.6, "key_multiplier": 0.9,
         "mlp_multipliers": [0.8, 0.5], "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.3,
         "ssm_multipliers": [0.9, 0.8, 1.2, 1.1, 0.7]},
    ),
    "falcon-h1-normed": (
        "FalconH1",
        {"num_hidden_layers": 2, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_n_groups": 2,
         "mamba_d_head": 16, "mamba_d_state": 16, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "cohere2moe-softmax": (
        "Cohere2Moe",
        {"num_hidden_layers": 4, "sliding_window": 16, "head_dim": 16, "num_experts": 5,
         "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    ),
}  # fmt: skip
"""Name -> beginning of the names of transformers' classes, and what differs from _SIZES."""

COMPUTED_ONCE = (
    "qwen2moe", "olmoe", "hunyuan", "hunyuanmoe", "hy-v3", "solar-open", "glm4", "glm4v", "exaone4",
    "exaone4-windows", "ernie4.5", "ernie4.5-moe", "gemma2", "gemma3n", "laguna", "laguna-by-column",
    "qwen2vl", "muse-glimmer", "exaone-moe", "apertus", "llama4",
    "qwen2.5vl", "qwen3vl", "qwen3vlmoe", "cohere2", "cohere2moe", "cohere2moe-softmax", "lfm2", "lfm2moe",
    "falcon-h1", "falcon-h1-normed", "kimi-linear", "ling3-groups", "ling3-compressed", "glm5-next",
    "glm5-next-shared",
    "minimax-m3", "starcoder2", "qwen4exp", "qwen4exp-blocks", "mimo-v2-flash",
    "step3.7",
)  # fmt: skip
"""Models that every run computes once, against transformers. The rest that is compared is slow."""

CASES = [pytest.param(name, marks=pytest.mark.slow) if name in COMPUTED_ONCE else name for name in MODELS]

_WITHOUT_TRUNCATE = {"rope_type": "yarn", "factor": 32.0, "rope_theta": 150000.0, "truncate": False,
                     "original_max_position_embeddings": 4096}  # fmt: skip

OUR_MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mistral-window": ("Mistral", {"sliding_window": 16}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3moe-unnormalised": (
        "Qwen3Moe",
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": False},
    ),
    "glm4moe-groups": (
        "Glm4Moe",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 4,
         "topk_group": 2, "num_mtp_layers": 0},
    ),
    "gpt-oss-untruncated": (
        "GptOss", {**_EXPERTS, "head_dim": 16, "sliding_window": 16, "rope_parameters": _WITHOUT_TRUNCATE}
    ),
    "phimoe": (
        "Phimoe",
        {**_EXPERTS, "attention_bias": True, "lm_head_bias": True, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40,
            "short_mscale": 1.25, "long_mscale": 1.25, "short_factor": [1.0 + n / 8 for n in range(8)],
            "long_factor": [1.0 + n for n in range(8)]}},
    ),
    "llama-mlp-bias": ("Llama", {"mlp_bias": True}),
    "minimax-m3-chosen": (
        "MiniMaxM3VL", {**_MINIMAX_M3, "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 2}
    ),
}  # fmt: skip
"""Models that llama.cpp can't load, or computes otherwise than transformers does."""


_FACTORS = ("router.scale", "per_expert_scale", "layer_scalar", "alpha_n", "alpha_p", "output_scale")
"""Ends of the names of what numbers are multiplied by."""


def decoder_model(name: str, folder: Path, **others: Any) -> Any:
    """Save a model in `folder`, with gpt-oss's tokenizer; return it in float32.

    others  sizes besides those of the name
    """
    import torch
    import transformers

    kind, changes = {**MODELS, **OUR_MODELS}[name]
    torch.manual_seed(len(name))
    text = "Text" if hasattr(transformers, f"{kind}TextConfig") else ""
    sizes, head = {**_SIZES, **changes, **others}, "CausalLM"
    if "vision_config" in sizes:
        text, head, vision = "", "ConditionalGeneration", sizes.pop("vision_config")
        tied = sizes.pop("tie_word_embeddings")
        sizes = {"text_config": sizes, "vision_config": vision, "tie_word_embeddings": tied}
    config = getattr(transformers, f"{kind}{text}Config")(**sizes)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}For{head}")(config).float().eval()
    with torch.no_grad():
        for parameter_name, tensor in model.state_dict().items():
            if "bias" in parameter_name:
                tensor.normal_(0, 0.3)
            elif parameter_name.endswith("A_log"):
                tensor.uniform_(-1, 0.5)
            elif tensor.dim() > 1 or "sinks" in parameter_name:
                tensor.normal_(0, 0.12)
            elif "norm" in parameter_name or parameter_name.endswith(_FACTORS):
                tensor.normal_(float(tensor.mean()), 0.2)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "gpt-oss" / file, folder / file)
    return model


def sample_deviation(x: Any, **how: Any) -> Any:
    """Return the deviation that llama.cpp takes in Gemma 3n, in place of transformers' (torch.std)."""
    return x.std(**{**how, "unbiased": True})


SHALLOW_GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 2, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.95, 0.95],
}  # fmt: skip
"""Changes that leave a gemma3n two layers: its 22 magnify what is rounded."""
