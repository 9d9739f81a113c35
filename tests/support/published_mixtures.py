"""Small checkpoints of published mixtures of experts; see published_models.py."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.published_checkpoint import COMMON, Published
from tests.support.published_shapes import llama4, minimax_m3

MIXTURES: Mapping[str, Published] = {
    "minimax-m3": Published(
        {**COMMON, "architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3_text",
         "num_hidden_layers": 4, "head_dim": 32, "num_key_value_heads": 2, "rotary_dim": 16,
         "partial_rotary_factor": 0.5, "rope_theta": 5000000, "intermediate_size": 32,
         "dense_intermediate_size": 96, "shared_intermediate_size": 32, "n_shared_experts": 1,
         "num_local_experts": 6, "num_experts_per_tok": 2, "moe_layer_freq": [0, 0, 1, 1],
         "scoring_func": "sigmoid", "use_routing_bias": True, "routed_scaling_factor": 2.0,
         "hidden_act": "swigluoai", "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "use_gemma_norm": True,
         "use_qk_norm": True, "qk_norm_type": "per_head", "attention_output_gate": False,
         "num_mtp_modules": 7, "num_nextn_predict_layers": 1, "attention_bias": None,
         "sparse_attention_config": {
             "use_sparse_attention": True, "sparse_index_dim": 32, "sparse_num_index_heads": 2,
             "sparse_topk_blocks": 2, "sparse_block_size": 16, "sparse_score_type": "max",
             "sparse_init_block": 0, "sparse_local_block": 1, "sparse_disable_index_value": [0, 0, 1, 1],
             "sparse_attention_freq": [0, 0, 1, 1]}},
        minimax_m3, "gpt-oss",
        around={"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
                "image_token_index": 3, "video_token_index": 4, "vision_config": {"model_type": "clip"}},
        prefix="language_model.",
        extra={"vision_tower.vision_model.pre_layrnorm.weight": (8,), "patch_merge_mlp.linear_1.bias": (8,)},
    ),
    "llama-4": Published(
        {**COMMON, "model_type": "llama4_text", "num_hidden_layers": 4, "head_dim": 32,
         "num_key_value_heads": 2, "intermediate_size": 32, "intermediate_size_mlp": 96,
         "num_local_experts": 6, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
         "moe_layers": [1, 3], "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 8192,
         "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1, "use_qk_norm": True,
         "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "for_llm_compressor": False,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
        llama4, "gpt-oss",
        around={"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
                "image_token_index": 3, "boi_token_index": 4, "eoi_token_index": 5,
                "vision_config": {"model_type": "llama4_vision_model"}},
        prefix="language_model.",
        extra={"vision_model.class_embedding": (8,), "multi_modal_projector.linear_1.weight": (8, 8)},
    ),
}  # fmt: skip
