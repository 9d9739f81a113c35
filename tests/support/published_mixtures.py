"""Small checkpoints of published models, most of them mixtures of experts; see published_models.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from tests.support.checkpoints import Tensors
from tests.support.published_checkpoint import COMMON, Published, beside_vision
from tests.support.published_shapes import _PROJ, Config, Shapes, _ends, _mlp, _mtp, decoder, gemma


def minimax_m3(config: Config) -> Shapes:
    """Yield the tensors of a MiniMax-M3: two dense layers, then shared experts and an indexer."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    sparse, n_experts = config["sparse_attention_config"], config["num_local_experts"]
    sizes = {"intermediate_size": config["dense_intermediate_size"], "first_k_dense_replace": 2,
             "n_routed_experts": n_experts, "n_shared_experts": 1, "moe_intermediate_size": width,
             "attention_bias": False, "num_nextn_predict_layers": 0}  # fmt: skip
    dense = {key: value for key, value in config.items() if key not in ("num_local_experts", "qk_norm_type")}
    for name, shape in decoder({**dense, **sizes}):
        layer, _, part = name.partition(".mlp.")
        if "self_attn.q_norm" in name and int(name.split(".")[2]) >= 2:
            cols = sparse["sparse_index_dim"]
            index = name.replace("q_norm.weight", "index_")
            yield f"{index}q_proj.weight", (sparse["sparse_num_index_heads"] * cols, hidden)
            yield f"{index}k_proj.weight", (cols, hidden)
            yield f"{index}q_norm.weight", (cols,)
            yield f"{index}k_norm.weight", (cols,)
        if part.startswith("gate.weight"):
            block = f"{layer}.block_sparse_moe"
            yield f"{block}.gate.weight", shape
            yield f"{block}.e_score_correction_bias", (n_experts,)
            for expert in range(n_experts):
                yield from _mlp(f"{block}.experts.{expert}", width, hidden, ("w1", "w3", "w2"))
        elif "shared_experts" in part:
            yield f"{layer}.block_sparse_moe.{part}", shape
        elif "expert" not in part and "e_score" not in part:
            yield name, shape


def llama4(config: Config) -> Shapes:
    """Yield the tensors of a Llama 4: stacks of experts with rows as columns in every second layer."""
    hidden, width, n_experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    dense = {key: value for key, value in config.items() if key != "num_local_experts"}
    dense |= {"intermediate_size": config["intermediate_size_mlp"], "use_qk_norm": False}  # it has no weight
    for name, shape in decoder(dense):
        layer, _, part = name.partition(".mlp.")
        if not part:
            yield name, shape
        elif (int(layer.split(".")[2]) + 1) % config["interleave_moe_layer_step"]:
            yield f"{layer}.feed_forward.{part}", shape
        elif part == "gate_proj.weight":
            block = f"{layer}.feed_forward"
            yield f"{block}.experts.gate_up_proj", (n_experts, hidden, 2 * width)
            yield f"{block}.experts.down_proj", (n_experts, width, hidden)
            yield f"{block}.router.weight", (n_experts, hidden)
            yield from _mlp(f"{block}.shared_expert", width, hidden, _PROJ)


def muse_glimmer(config: Config) -> Shapes:
    """Yield the tensors of a Muse Glimmer: norms around attention and block, and a gate of attention."""
    for name, shape in gemma(config):
        yield name, shape
        if name.endswith("self_attn.q_proj.weight"):
            yield name.replace("q_proj", "gate_proj"), shape


def exaone_moe(config: Config) -> Shapes:
    """Yield the tensors of an EXAONE 4 with experts: an MTP layer has those of the first one, and its own."""
    sizes = {"use_qk_norm": True, "n_routed_experts": config["num_experts"],
             "n_shared_experts": config["num_shared_experts"], "num_nextn_predict_layers": 0}  # fmt: skip
    for name, shape in decoder({**config, **sizes}):
        yield name.replace("mlp.gate.e_score", "mlp.e_score"), shape
        if name.startswith("model.layers.0."):
            yield name.replace("model.", "mtp."), shape
    hidden = config["hidden_size"]
    yield "mtp.fc.weight", (hidden, 2 * hidden)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield f"mtp.{norm}.weight", (hidden,)


def apertus(config: Config) -> Shapes:
    """Yield the tensors of an Apertus: blocks without a gate, and four numbers of their activation."""
    for name, shape in decoder({**config, "use_qk_norm": True, "head_dim": None}):
        name = name.replace("input_layernorm", "attention_layernorm")
        if ".gate_proj." not in name:
            yield name.replace("post_attention_layernorm", "feedforward_layernorm"), shape
        if ".up_proj." in name:
            act = name.replace("up_proj.weight", "act_fn")
            yield from ((f"{act}.{part}", (1,)) for part in ("alpha_n", "alpha_p", "beta", "eps"))


def step35(config: Config) -> Shapes:
    """Yield the tensors of a Step 3.5: heads by kind of layer, stacks of experts, two MTP layers."""
    yield from _ends(config)
    hidden, n_layers, cols = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    width, n_experts, other = (
        config[key] for key in ("moe_intermediate_size", "moe_num_experts", "attention_other_setting")
    )
    for layer in range(n_layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}"
        of = other if config["layer_types"][layer] == "sliding_attention" else config
        heads, kv_heads = of["num_attention_heads"], of["num_attention_groups"]
        for part, rows in (("q", heads * cols), ("k", kv_heads * cols), ("v", kv_heads * cols), ("g", heads)):
            yield f"{prefix}.self_attn.{part}_proj.weight", (rows, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads * cols)
        for norm, n_cols in (("input_layer", hidden), ("post_attention_layer", hidden),
                             ("self_attn.q_", cols), ("self_attn.k_", cols)):  # fmt: skip
            yield f"{prefix}.{norm}norm.weight", (n_cols,)
        if str(layer) not in config["moe_layers_enum"].split(","):
            yield from _mlp(f"{prefix}.mlp", config["intermediate_size"], hidden, _PROJ)
        else:
            yield f"{prefix}.moe.gate.weight", (n_experts, hidden)
            yield f"{prefix}.moe.router_bias", (n_experts,)
            for name, shape in _mlp(f"{prefix}.moe", width, hidden, _PROJ):
                yield name, (n_experts, *shape)
            yield from _mlp(f"{prefix}.share_expert", config["share_expert_dim"], hidden, _PROJ)
        if layer >= n_layers:
            for name, shape in _mtp(prefix, hidden):
                yield name.replace("shared_head", "transformer.shared_head"), shape
            yield f"{prefix}.transformer.shared_head.output.weight", (config["vocab_size"], hidden)


def norms_less_one(tensors: Tensors) -> Tensors:
    """Return the tensors with norms less one, as some checkpoints have them."""
    return {
        name: weight - weight.dtype.type(1) if name.endswith("norm.weight") else weight
        for name, weight in tensors.items()
    }


def phimoe(config: Config) -> Shapes:
    """Yield the tensors of a Phi-3.5-MoE: biases everywhere but in the experts, which have no biases."""
    for name, shape in decoder({**config, "head_dim": None}):
        if "e_score" not in name:
            yield name, shape
        if "norm" in name or ".o_proj." in name or name == "lm_head.weight":
            yield name.replace(".weight", ".bias"), shape[:1]


_LLAMA_TOKENIZER = json.dumps({
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_prefix_space": False,
    "tokenizer_class": "LlamaTokenizer",
})  # fmt: skip

_MIXTURES: Mapping[str, Published] = {
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
    "k-exaone": Published(
        {**COMMON, "architectures": ["ExaoneMoEForCausalLM"], "model_type": "exaone_moe", "vocab_size": 640,
         "bos_token_id": None, "eos_token_id": 538, "num_hidden_layers": 5, "head_dim": 32,
         "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "sliding_window": 16,
         "sliding_window_pattern": "LLLG", "first_k_dense_replace": 1,
         "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"],
         "is_moe_layer": [False, *[True] * 4], "moe_intermediate_size": 32, "num_experts": 6,
         "num_experts_per_tok": 2, "num_shared_experts": 1, "n_group": 1, "topk_group": 1,
         "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
         "scoring_func": "sigmoid", "num_nextn_predict_layers": 1, "rope_theta": 1000000,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
        exaone_moe, "qwen3moe", cutting="exaone-moe",
    ),
    "apertus": Published(
        {**COMMON, "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "hidden_act": "xielu",
         "num_key_value_heads": 2, "mlp_bias": False, "post_norm": False, "qk_norm": True,
         "rms_norm_eps": 1e-5, "rope_theta": 12000000, "rope_scaling": {
             "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
             "original_max_position_embeddings": 8192, "rope_type": "llama3", "type": "llama3"}},
        apertus, "llama-r1-distill",
    ),
    "step-3.5": Published(
        {**{key: value for key, value in COMMON.items() if key != "num_key_value_heads"}, "vocab_size": 640,
         "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "bos_token_id": None,
         "eos_token_id": 538, "num_hidden_layers": 4, "num_nextn_predict_layers": 2, "head_dim": 32,
         "num_attention_groups": 2, "sliding_window": 16, "use_head_wise_attn_gate": True,
         "attention_other_setting": {
             "attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 3,
             "head_dim": 32, "true_head_dim": 32},
         "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention",
                         *["sliding_attention"] * 2],
         "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0, 1.0], "yarn_only_types": ["full_attention"],
         "rope_theta": [5000000.0, 10000.0, 10000.0, 5000000.0, 10000.0, 10000.0],
         "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64,
                          "low_freq_factor": 1.0, "high_freq_factor": 32.0},
         "moe_layers_enum": "1,2,3", "moe_num_experts": 6, "moe_top_k": 2, "moe_intermediate_size": 32,
         "share_expert_dim": 48, "moe_every_n_layer": 1, "moe_layer_offset": 0, "use_moe": True,
         "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "norm_expert_weight": True,
         "use_moe_router_bias": True, "need_fp32_gate": True, "zero_centered": True, "att_impl_type": "GQA",
         "use_rope_layers": [], "max_seq_len": 4096, "swiglu_limits": [0.0, 0.0, 0.03, None, 0.0, 0.0],
         "swiglu_limits_shared": [0.0, 0.04, 0.0, 0.05, 0.0, 0.0]},
        step35, "qwen3moe", edit=norms_less_one,
    ),
    "phi-3.5-moe": Published(
        {**COMMON, "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "vocab_size": 512,
         "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0,
         "attention_bias": True, "lm_head_bias": True, "hidden_dropout": 0.0, "num_key_value_heads": 2,
         "num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.01,
         "input_jitter_noise": 0.01, "max_position_embeddings": 131072, "sliding_window": 131072,
         "original_max_position_embeddings": 4096, "rope_scaling": {
             "type": "longrope", "original_max_position_embeddings": 4096,
             "short_mscale": 1.1902380714238083, "long_mscale": 1.1902380714238083,
             "short_factor": [1.0 + n / 8 for n in range(8)], "long_factor": [1.0 + n for n in range(8)]}},
        phimoe, "sentencepiece", files={"tokenizer_config.json": _LLAMA_TOKENIZER},
    ),
    "muse-glimmer": Published(
        {**COMMON, "model_type": "muse_glimmer_text", "hidden_act": None, "hidden_activation": "silu",
         "num_hidden_layers": 4, "head_dim": 32, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
         "post_norm_eps": 1e-8, "sliding_window": 2048, "final_logit_softcapping": 20.0,
         "qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404, "rope_theta": None,
         "layer_types": [*["sliding_attention"] * 3, "full_attention"],
         "layer_rope_theta": [500000.0, 500000.0, 500000.0, 0],
         "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        muse_glimmer, "gpt-oss", edit=beside_vision, words=("<|eot|>",),
        around={"architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer",
                "image_token_id": 3, "video_token_id": 4,
                "vision_config": {"model_type": "muse_glimmer_vision"}},
        extra={"model.vision_tower.ln_pre.weight": (8,), "model.vision_adapter.fc1.weight": (8, 8),
               "model.vision_projection.weight": (8, 8)},
    ),
}  # fmt: skip

MIXTURES: Mapping[str, Published] = {
    **_MIXTURES,
    "step-3.7": replace(
        _MIXTURES["step-3.5"],
        around={"architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7",
                "image_token_id": 3, "vision_config": {"model_type": "step3p5_vision"}},
        extra={"vision_model.conv1.weight": (8, 3, 2, 2), "vit_large_projector.weight": (8, 8)},
    ),
}  # fmt: skip
