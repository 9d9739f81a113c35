"""Small checkpoints of published models that have no recorded folder: names, shapes and configurations.

Their weights are a formula on integers, the same bits everywhere. `write(name, folder)` makes one, with the
tokenizer of a recorded model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.support.published_checkpoint import COMMON as _COMMON
from tests.support.published_checkpoint import Published, beside_vision, with_int4_experts, write_published
from tests.support.published_embeddings import EMBEDDINGS
from tests.support.published_gemma3n import GEMMA3N
from tests.support.published_glm5_next import glm5_next_models
from tests.support.published_kimi import KIMI_MODELS
from tests.support.published_ling3 import LING3_MODELS
from tests.support.published_mimo import MIMO_MODELS
from tests.support.published_mixtures import MIXTURES
from tests.support.published_qwen4 import qwen4_model
from tests.support.published_shapes import (
    Config,
    bailing,
    cohere,
    decoder,
    delta_net,
    ernie,
    exaone4,
    falcon_h1,
    gemma,
    gemma4,
    glm4,
    granite,
    hunyuan,
    hy_v3,
    laguna,
    latent,
    lfm2,
    mixture,
    nemotron,
    olmo,
    phi,
    qwen,
    starcoder2,
)

_LATENT: Config = {
    **_COMMON, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "moe_intermediate_size": 32, "moe_layer_freq": 1, "n_routed_experts": 6,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
_ABOUT_EXPERTS = (
    "moe_intermediate_size", "moe_layer_freq", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor",
    "first_k_dense_replace", "num_nextn_predict_layers",
)  # fmt: skip
_DENSE: Config = {key: value for key, value in _LATENT.items() if key not in _ABOUT_EXPERTS}
_KIMI: Config = {"vocab_size": 812, "bos_token_id": 556, "eos_token_id": 558, "pad_token_id": 811}
_GLM: Config = {"vocab_size": 640, "bos_token_id": None, "eos_token_id": [556, 563, 565], "pad_token_id": 556,
                "rms_norm_eps": 1e-5}  # fmt: skip
_DELTA_NET: Config = {
    **_COMMON, "vocab_size": 640, "bos_token_id": None, "eos_token_id": 538, "num_hidden_layers": 4,
    "head_dim": 32, "num_key_value_heads": 2, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "intermediate_size": 96,
}  # fmt: skip
_QWEN_TOKENS: Config = {
    **_COMMON, "vocab_size": 640, "bos_token_id": None, "eos_token_id": 538,
}  # fmt: skip
_QWEN3: Config = {
    **_QWEN_TOKENS, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32,
    "num_key_value_heads": 2, "rope_theta": 1000000, "rope_scaling": None, "use_sliding_window": False,
    "sliding_window": None, "max_window_layers": 3,
}  # fmt: skip
_MODULES = json.dumps(
    [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
)
_RERANKER = {"README.md": "---\nlicense: apache-2.0\n---\n\n# Qwen3-Reranker-0.6B\n"}
_COHERE: Config = {
    **{key: value for key, value in _COMMON.items() if key != "rms_norm_eps"}, "num_hidden_layers": 5,
    "layer_norm_eps": 1e-5, "logit_scale": 0.25, "num_key_value_heads": 2, "sliding_window": 16,
    "rope_theta": 50000, "tie_word_embeddings": True, "head_dim": 16, "use_qk_norm": False,
}  # fmt: skip
_LFM2: Config = {
    **{key: value for key, value in _COMMON.items() if key not in ("rms_norm_eps", "hidden_act")},
    "num_key_value_heads": 2, "norm_eps": 1e-5, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    "conv_bias": False, "conv_L_cache": 3,
}  # fmt: skip
_GRANITE: Config = {
    "head_dim": None, "num_key_value_heads": 2, "attention_multiplier": 0.125, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22, "logits_scaling": 8.0,
}  # fmt: skip
_MAMBA: Config = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
    "shared_intermediate_size": 96, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_d_head": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}  # fmt: skip
_NEMOTRON: Config = {
    **{key: value for key, value in _COMMON.items() if key not in ("hidden_act", "rms_norm_eps")},
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "num_key_value_heads": 2,
    "head_dim": 32, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "mlp_hidden_act": "relu2",
    "mlp_bias": False, "use_bias": False, "use_conv_bias": True, "conv_kernel": 4, "chunk_size": 128,
    "expand": 2, "ssm_state_size": 16, "n_groups": 2, "mamba_num_heads": 12, "mamba_head_dim": 16,
    "mamba_hidden_act": "silu", "mamba_proj_bias": False, "partial_rotary_factor": 1.0,
    "time_step_min": 0.001, "time_step_max": 0.1, "residual_in_fp32": False,
}  # fmt: skip
_NEMOTRON_EXPERTS: Config = {
    **_NEMOTRON, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
_QWEN_EXPERTS: Config = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
_ALPHA = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
          "mscale_all_dim": 1.0, "type": "dynamic"}  # fmt: skip
_LLAMA3 = {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
           "original_max_position_embeddings": 64, "rope_type": "llama3"}  # fmt: skip
_ERNIE: Config = {
    "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
          "mrope_interleaved": True, "mrope_section": [2, 1, 1]}  # fmt: skip
_YARN = {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
         "original_max_position_embeddings": 4096, "type": "yarn"}  # fmt: skip
_PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True,
    }}},
}  # fmt: skip


def _gemma4(sizes: Config, kind: str = "Gemma4", generation: Config | None = None) -> Published:
    """Return a Gemma 4 of these sizes, beside a vision part."""
    config = {
        "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
        "sliding_window": 16, "vocab_size": 515, "vocab_size_per_layer_input": 515, "rms_norm_eps": 1e-6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 4096, "tie_word_embeddings": True, "attention_bias": False,
        "attention_k_eq_v": False, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "enable_moe_block": False, "use_double_wide_mlp": False, "num_global_key_value_heads": None,
        "moe_intermediate_size": None, "num_experts": None, "top_k_experts": None,
        "final_logit_softcapping": 30.0, "torch_dtype": "bfloat16", "bos_token_id": 2, "eos_token_id": 1,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                               "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }, **sizes,
    }  # fmt: skip
    around = {"architectures": [f"{kind}ForConditionalGeneration"], "model_type": "gemma4",
              "eos_token_id": [1, 8], "bos_token_id": 2,
              "vision_config": {"model_type": "gemma4_vision"}}  # fmt: skip
    extra = {"model.vision_tower.patch_embedder.input_proj.weight": (4, 4),
             "model.embed_vision.embedding_projection.weight": (4, 4)}  # fmt: skip
    return Published(config, gemma4, "", beside_vision, around=around, extra=extra, generation=generation)


_VISION = {"vision_tower.patch_embed.weight": (4, 4), "multi_modal_projector.linear_1.weight": (4, 4)}

PUBLISHED: Mapping[str, Published] = {
    "moonlight": Published(
        {**_LATENT, **_KIMI, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
         "q_lora_rank": None, "num_hidden_layers": 27, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
         "n_shared_experts": 2, "routed_scaling_factor": 2.446},
        latent, "kimi-k2",
    ),
    "gigachat3": Published(
        {**_LATENT, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
         "q_lora_rank": None, "num_hidden_layers": 26, "rope_theta": 100000, "num_nextn_predict_layers": 1,
         "rope_scaling": {**_YARN, "beta_fast": 32}},
        latent, "deepseek-v3.2",
    ),
    "kimi-k2-thinking": Published(
        {**_LATENT, **_KIMI, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
         "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "rope_scaling": _YARN,
         "quantization_config": _PACKED},
        latent, "kimi-k2", with_int4_experts,
    ),
    "kimi-vl": Published(
        {**_LATENT, **_KIMI, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
         "q_lora_rank": None, "num_hidden_layers": 27, "rope_theta": 800000.0},
        latent, "kimi-k2",
        around={"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl",
                "torch_dtype": "bfloat16", "vision_config": {"model_type": "moonvit"}, **_KIMI},
        prefix="language_model.", extra=_VISION,
    ),
    "youtu": Published(
        {**_DENSE, "architectures": ["YoutuForCausalLM"], "model_type": "youtu", "tie_word_embeddings": True,
         "rope_theta": 1600000, "mlp_bias": False, "rope_interleave": True},
        latent, "deepseek-v3.2",
    ),
    "glm-5": Published(
        {**_LATENT, **_GLM, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
         "num_hidden_layers": 4, "num_nextn_predict_layers": 1, "head_dim": 8, "index_n_heads": 32,
         "index_head_dim": 64, "index_topk": 16, "indexer_types": ["full", "shared", "full", "shared"],
         "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
        latent, "glm-4.7-flash",
    ),
    "glm-4.6": Published(
        {**_COMMON, **_GLM, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
         "moe_intermediate_size": 32, "n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2,
         "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
         "first_k_dense_replace": 1, "attention_bias": True, "head_dim": 16, "partial_rotary_factor": 0.5,
         "num_key_value_heads": 2, "num_nextn_predict_layers": 1, "use_qk_norm": True, "rope_theta": 1000000},
        decoder, "glm4moe-air",
    ),
    "minimax-m2": Published(
        {**_COMMON, "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 32,
         "num_key_value_heads": 2, "rotary_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
         "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True,
         "qk_norm_type": "per_layer", "use_mtp": True, "num_mtp_modules": 3, "rope_theta": 5000000,
         "rms_norm_eps": 1e-6},
        decoder, "gpt-oss",
    ),
    "starcoder2": Published(
        {**_COMMON, "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2",
         "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 999999.4420358813,
         "norm_epsilon": 1e-5, "rms_norm_eps": None, "norm_type": "layer_norm", "mlp_type": "default",
         "hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": 1024, "vocab_size": 640,
         "attention_bias": None, "bos_token_id": 0, "eos_token_id": 0},
        starcoder2, "qwen3moe", cutting="gpt-2",
    ),
    "smollm3": Published(
        {**_COMMON, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_hidden_layers": 5,
         "num_key_value_heads": 2, "head_dim": None, "tie_word_embeddings": True, "rope_theta": 5000000.0,
         "no_rope_layers": [1, 1, 1, 0, 1], "no_rope_layer_interval": 4, "mlp_bias": False,
         "attention_bias": False, "use_sliding_window": False},
        decoder, "llama-r1-distill",
    ),
    "laguna": Published(
        {**_QWEN_TOKENS, "architectures": ["LagunaForCausalLM"], "model_type": "laguna", "head_dim": 32,
         "num_key_value_heads": 2, "num_hidden_layers": 4, "bos_token_id": 536, "eos_token_id": [536, 542],
         "layer_types": ["full_attention", *["sliding_attention"] * 3], "sliding_window": 16,
         "num_attention_heads_per_layer": [4, 6, 6, 6], "gating": True, "num_experts": 6,
         "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
         "mlp_layer_types": ["dense", *["sparse"] * 3], "moe_routed_scaling_factor": 2.5,
         "moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0, "rope_theta": None,
         "rope_parameters": {
             "full_attention": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 32.0,
                                "original_max_position_embeddings": 4096, "beta_fast": 64.0, "beta_slow": 1.0,
                                "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0,
                                   "partial_rotary_factor": 1.0}}},
        laguna, "qwen3moe", cutting="laguna", renamed={"</think>": "</assistant>"},
    ),
    "gemma-2": Published(
        {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 512, "hidden_size": 64,
         "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "sliding_window_size": 16,
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
         "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "gelu_pytorch_tanh",
         "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
         "unk_token_id": 0},
        gemma, "sentencepiece",
    ),
    "gemma-3": Published(
        {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32,
         "sliding_window": 16, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "vocab_size": 543,
         "tie_word_embeddings": True, "attention_bias": False, "use_qk_norm": True,
         "torch_dtype": "bfloat16"},
        gemma, "qwen3moe",
        around={"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                "eos_token_id": [538, 537], "bos_token_id": 536,
                "vision_config": {"model_type": "siglip_vision_model"}},
        prefix="language_model.", extra=_VISION,
    ),
    **EMBEDDINGS,
    **GEMMA3N,
    "gemma-4": _gemma4({
        "num_attention_heads": 8, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    }),
    "gemma-4-moe": _gemma4({
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": True,
        "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32,
    }),
    "gemma-4-e": _gemma4({
        "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
    }),
    "gemma-4-12b": _gemma4({"use_bidirectional_attention": "vision"}, "Gemma4Unified", {
        "suppress_tokens": [1, 3, 6],
    }),
    "seed-oss": Published(
        {**_QWEN_TOKENS, "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "head_dim": 32,
         "num_key_value_heads": 2, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
         "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0},
        decoder, "qwen3moe", cutting="seed-coder",
    ),
    "olmo-2": Published(
        {**_QWEN_TOKENS, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2",
         "head_dim": None, "rope_theta": 500000},
        olmo, "qwen3moe", cutting="dbrx",
    ),
    "olmo-3": Published(
        {**_QWEN_TOKENS, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "head_dim": None,
         "num_hidden_layers": 4, "sliding_window": 16, "rope_theta": 500000,
         "layer_types": [*["sliding_attention"] * 3, "full_attention"],
         "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512,
                          "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.2079441541679836}},
        olmo, "qwen3moe", cutting="dbrx",
    ),
    "phi-4": Published(
        {**_QWEN_TOKENS, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "head_dim": None,
         "num_key_value_heads": 2, "sliding_window": None, "original_max_position_embeddings": 4096,
         "rope_theta": 250000, "partial_rotary_factor": 1.0},
        phi, "qwen3moe", cutting="dbrx", tokenizer_class="GPT2Tokenizer",
    ),
    "phi-4-mini": Published(
        {**_QWEN_TOKENS, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "head_dim": None,
         "num_key_value_heads": 2, "sliding_window": 262144, "original_max_position_embeddings": 256,
         "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
         "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8],
                          "long_factor": [1.0, 1.5, 3.0, 8.0, 20.0, 40.0]}},
        phi, "qwen3moe", cutting="dbrx", tokenizer_class="GPT2Tokenizer",
    ),
    "granite-3": Published(
        {**_QWEN_TOKENS, **_GRANITE, "architectures": ["GraniteForCausalLM"], "model_type": "granite"},
        granite, "qwen3moe", cutting="dbrx",
    ),
    "granite-3-moe": Published(
        {**_QWEN_TOKENS, **_GRANITE, "architectures": ["GraniteMoeForCausalLM"],
         "model_type": "granitemoe", "num_local_experts": 6, "num_experts_per_tok": 2},
        granite, "qwen3moe", cutting="dbrx",
    ),
    "granite-4": Published(
        {**_QWEN_TOKENS, **_GRANITE, **_MAMBA, "layer_types": ["attention"] * 3,
         "num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope"},
        granite, "qwen3moe", cutting="dbrx",
    ),
    "granite-4-h": Published(
        {**_QWEN_TOKENS, **_GRANITE, **_MAMBA, "layer_types": ["mamba", "mamba", "attention"],
         "num_local_experts": 6, "num_experts_per_tok": 2, "position_embedding_type": "nope"},
        granite, "qwen3moe", cutting="dbrx",
    ),
    "nemotron-h": Published(
        {**_NEMOTRON, "hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5},
        nemotron, "llama-r1-distill",
    ),
    "nemotron-3-nano": Published(
        {**_NEMOTRON_EXPERTS, "hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5},
        nemotron, "llama-r1-distill",
    ),
    "nemotron-3-super": Published(
        {**_NEMOTRON_EXPERTS, "hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5,
         "moe_latent_size": 48, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
        nemotron, "llama-r1-distill",
    ),
    "ministral-3": Published(
        {**_COMMON, "model_type": "ministral3", "head_dim": 32, "num_key_value_heads": 2,
         "rms_norm_eps": 1e-5, "sliding_window": None, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "yarn", "type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
                             "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
                             "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
        decoder, "llama-r1-distill",
        around={"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
                "tie_word_embeddings": True, "vision_config": {"model_type": "pixtral"}},
        prefix="language_model.", extra=_VISION,
    ),
    "qwen3-next": Published(
        {**_DELTA_NET, **_QWEN_EXPERTS, "architectures": ["Qwen3NextForCausalLM"],
         "model_type": "qwen3_next", "partial_rotary_factor": 0.25, "rope_theta": 10000000,
         "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
        delta_net, "qwen3moe",
    ),
    "qwen3.5": Published(
        {**_DELTA_NET, "model_type": "qwen3_5_text", "num_hidden_layers": 8, "linear_num_value_heads": 6,
         "rope_parameters": _MROPE, "mtp_num_hidden_layers": 1, "attn_output_gate": True},
        delta_net, "qwen3moe", beside_vision,
        around={"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
                "vision_config": {"model_type": "qwen3_5"}, "tie_word_embeddings": False},
        extra={"model.visual.patch_embed.proj.weight": (4, 4)}, cutting="qwen35",
    ),
    "qwen3.5-moe": Published(
        {**{key: value for key, value in _DELTA_NET.items() if key != "intermediate_size"}, **_QWEN_EXPERTS,
         "model_type": "qwen3_5_moe_text", "rope_parameters": _MROPE,
         "mtp_num_hidden_layers": 1, "attn_output_gate": True,
         "layer_types": [*["linear_attention"] * 3, "full_attention"]},
        delta_net, "qwen3moe", beside_vision,
        around={"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
                "vision_config": {"model_type": "qwen3_5_moe"}, "tie_word_embeddings": False},
        extra={"model.visual.patch_embed.proj.weight": (4, 4)}, cutting="qwen35",
    ),
    "qwen4-exp": qwen4_model({**_DELTA_NET, **_QWEN_EXPERTS, "rope_parameters": _MROPE}),
    "qwen2.5-vl": Published(
        {**_QWEN_TOKENS, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
         "num_key_value_heads": 2, "attention_bias": True, "use_sliding_window": False,
         "sliding_window": 32768, "max_window_layers": 3, "rope_theta": 1000000.0, "rms_norm_eps": 1e-20,
         "vision_config": {"model_type": "qwen2_5_vl", "depth": 1}, "image_token_id": 600,
         "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}},
        qwen, "qwen3moe", extra={"visual.patch_embed.proj.weight": (4, 4)},
    ),
    "qwen3-vl": Published(
        {**_QWEN_TOKENS, "model_type": "qwen3_vl_text", "head_dim": 32, "num_key_value_heads": 2,
         "rope_theta": 5000000,
         "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"}},
        qwen, "qwen3moe", beside_vision,
        around={"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
                "vision_config": {"model_type": "qwen3_vl", "deepstack_visual_indexes": [1, 2, 3]},
                "tie_word_embeddings": False},
        extra={"model.visual.patch_embed.proj.weight": (4, 4)},
    ),
    "qwen3-vl-moe": Published(
        {**_QWEN_TOKENS, "model_type": "qwen3_vl_moe_text", "head_dim": 32, "num_key_value_heads": 2,
         "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "num_experts": 6,
         "num_experts_per_tok": 2, "moe_intermediate_size": 48, "rope_theta": 5000000,
         "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"}},
        qwen, "qwen3moe", beside_vision,
        around={"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe",
                "vision_config": {"model_type": "qwen3_vl_moe", "deepstack_visual_indexes": [1, 2, 3]},
                "tie_word_embeddings": False},
        extra={"model.visual.patch_embed.proj.weight": (4, 4)},
    ),
    "qwen2-moe": Published(
        {**_QWEN_TOKENS, **_QWEN_EXPERTS, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
         "num_key_value_heads": 2, "attention_bias": True, "decoder_sparse_step": 1, "norm_topk_prob": False,
         "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 3,
         "rope_theta": 1000000.0, "head_dim": None},
        mixture, "qwen3moe",
    ),
    "olmoe": Published(
        {**_QWEN_TOKENS, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_experts": 6,
         "num_experts_per_tok": 2, "norm_topk_prob": False, "clip_qkv": None, "rms_norm_eps": 1e-5,
         "use_qk_norm": True, "qk_norm_type": "per_layer", "head_dim": None},
        mixture, "qwen3moe", cutting="dbrx",
    ),
    "hunyuan": Published(
        {**_COMMON, "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense",
         "head_dim": 32, "num_key_value_heads": 2, "max_position_embeddings": 32768, "eod_token_id": 560,
         "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 10000.0, "rope_scaling": _ALPHA},
        hunyuan, "deepseek-v3.2", generation={"eos_token_id": [562, 560]},
    ),
    "hunyuan-moe": Published(
        {**_COMMON, "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe",
         "vocab_size": 515, "bos_token_id": 1, "eos_token_id": 306, "pad_token_id": 307,
         "hidden_size": 512, "head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 32768,
         "num_hidden_layers": 2, "num_experts": 6, "moe_topk": [2, 2], "moe_intermediate_size": [96, 96],
         "num_shared_expert": [1, 1], "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
         "rope_theta": 10000.0, "rope_scaling": _ALPHA},
        hunyuan, "hy.tiktoken",
    ),
    "glm-4": Published(
        {**_COMMON, **_GLM, "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "head_dim": 32,
         "num_key_value_heads": 2, "attention_bias": True, "partial_rotary_factor": 0.5},
        glm4, "glm4moe-air",
    ),
    "hy-v3": Published(
        {**_COMMON, "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "head_dim": 32,
         "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "num_experts": 6,
         "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": 32,
         "expert_hidden_dim": 32, "route_norm": True, "router_scaling_factor": 2.826,
         "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True, "qk_norm": True,
         "num_nextn_predict_layers": 1,
         "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"}},
        hy_v3, "deepseek-v3.2",
    ),
    "solar-open": Published(
        {**_QWEN_TOKENS, "architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open",
         "head_dim": 32, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "first_k_dense_replace": 0,
         "n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
         "use_qk_norm": False, "partial_rotary_factor": 1.0, "rope_theta": 1000000.0,
         "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}},
        decoder, "qwen3moe",
        renamed={"<|im_start|>": "<|startoftext|>", "<tool_call>": "<unk>"},
    ),
    "glm-4v": Published(
        {**_COMMON, **_GLM, "model_type": "glm4v_text", "num_key_value_heads": 2, "attention_bias": True,
         "head_dim": None, "partial_rotary_factor": 0.5,
         "rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]}},
        glm4, "glm4moe-air", beside_vision,
        around={"architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v",
                "vision_config": {"model_type": "glm4v", "depth": 1}, "tie_word_embeddings": False},
        extra={"model.visual.patch_embed.proj.weight": (4, 4)},
    ),
    "exaone-4": Published(
        {**_QWEN_TOKENS, "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "head_dim": 16,
         "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": None,
         "sliding_window_pattern": None, "layer_types": ["full_attention"] * 3, "rope_theta": 1000000.0,
         "rope_scaling": _LLAMA3},
        exaone4, "qwen3moe", cutting="gpt-2",
    ),
    "exaone-4-32b": Published(
        {**_QWEN_TOKENS, "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "hidden_size": 32,
         "intermediate_size": 32, "num_hidden_layers": 64, "num_attention_heads": 2, "head_dim": 16,
         "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "sliding_window": 16,
         "sliding_window_pattern": "LLLG", "rope_theta": 1000000.0, "rope_scaling": _LLAMA3,
         "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16},
        exaone4, "qwen3moe", cutting="gpt-2",
    ),
    "ernie-4.5": Published(
        {**_COMMON, **_ERNIE, "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5",
         "head_dim": 32},
        decoder, "sentencepiece",
    ),
    "ernie-4.5-moe": Published(
        {**_COMMON, **_ERNIE, "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe",
         "intermediate_size": 128, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32,
         "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2,
         "moe_layer_interval": 1, "moe_use_aux_free": True, "head_dim": None},
        ernie, "sentencepiece", extra={"model.mtp_emb_norm.0.weight": (4,)},
    ),
    "qwen3-embedding": Published(
        {**_QWEN3, "tie_word_embeddings": True}, qwen, "qwen3moe",
        lambda tensors: {name.removeprefix("model."): weight for name, weight in tensors.items()},
        files={"modules.json": _MODULES, "1_Pooling/config.json": '{"pooling_mode_lasttoken": true}'},
    ),
    "qwen3-reranker": Published(
        {**_QWEN3, "tie_word_embeddings": True}, qwen, "qwen3moe", words=("yes", "no"), files=_RERANKER,
    ),
    "qwen3-reranker-8b": Published(_QWEN3, qwen, "qwen3moe", words=("yes", "no"), files=_RERANKER),
    "command-r7b": Published(
        {**_COHERE, "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "rotary_pct": 1.0,
         "layer_switch": 4, "position_embedding_type": "rope_gptj", "sliding_window_pattern": 4,
         "order_of_interleaved_layers": "local_attn_first", "use_gated_activation": True,
         "use_parallel_block": True, "use_parallel_embedding": False},
        cohere, "llama-r1-distill",
    ),
    "command-a-plus": Published(
        {**_COHERE, "architectures": ["Cohere2MoeForCausalLM"], "model_type": "cohere2_moe",
         "tie_word_embeddings": False, "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 2,
         "expert_selection_fn": "sigmoid", "norm_topk_prob": True, "first_k_dense_replace": 1,
         "prefix_dense_intermediate_size": 160, "shared_expert_combination_strategy": "average",
         "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"]},
        cohere, "llama-r1-distill",
    ),
    "ling-mini-2": Published(
        {**_COMMON, "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe",
         "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "num_shared_experts": 1,
         "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
         "norm_topk_prob": True, "score_function": "sigmoid", "partial_rotary_factor": 0.5,
         "rope_theta": 600000, "use_qk_norm": True, "use_qkv_bias": False, "use_bias": False,
         "moe_router_enable_expert_bias": True, "num_nextn_predict_layers": 0, "rope_scaling": None},
        bailing, "llama-r1-distill",
    ),
    "falcon-h1": Published(
        {**_COMMON, "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1",
         "num_key_value_heads": 2, "head_dim": 16, "mamba_d_ssm": 96, "mamba_n_heads": 6,
         "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
         "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_rms_norm": False,
         "mamba_norm_before_gate": False, "projectors_bias": False, "mlp_bias": False,
         "rope_theta": 100000000000.0, "embedding_multiplier": 5.656854249492381,
         "lm_head_multiplier": 0.0390625, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375,
         "key_multiplier": 0.390625, "mlp_multipliers": [0.8838834764831844, 0.5859375],
         "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551587,
         "ssm_multipliers": [0.35355339059327373, 0.25, 0.3535, 0.5, 0.35355339059327373]},
        falcon_h1, "llama-r1-distill",
    ),
    "lfm2": Published(
        {**_LFM2, "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 4,
         "block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
         "block_dim": 64, "block_ff_dim": 96, "block_norm_eps": 1e-5, "block_use_swiglu": True,
         "conv_dim": 64, "conv_dim_out": 64, "num_heads": 4, "use_pos_enc": True,
         "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        lfm2, "llama-r1-distill",
    ),
    "lfm2-moe": Published(
        {**_LFM2, "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "num_hidden_layers": 4,
         "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 2,
         "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0,
         "layer_types": ["conv", "conv", "full_attention", "conv"]},
        lfm2, "llama-r1-distill",
    ),
    "mistral": Published(
        {**_COMMON, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 32,
         "num_key_value_heads": 2, "sliding_window": None, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5},
        decoder, "llama-r1-distill",
    ),
    **KIMI_MODELS,
    **LING3_MODELS,
    **glm5_next_models(_GLM),
    **MIMO_MODELS,
    **MIXTURES,
}  # fmt: skip
"""Models by name: what the recorded ones lack."""


def write(name: str, folder: Path) -> Path:
    """Write the checkpoint called `name` in PUBLISHED to a folder, and return that."""
    return write_published(PUBLISHED[name], folder)
