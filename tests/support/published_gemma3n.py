"""Gemma 3n as it is published, small: some sizes are constants in llama.cpp, and stay as they are."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.published_checkpoint import Published, beside_vision
from tests.support.published_shapes import Config, Shapes, gemma


def gemma3n(config: Config) -> Shapes:
    """Yield the tensors of a Gemma 3n: those of a Gemma 3, AltUp, LAuReL, and embeddings of layers."""
    hidden, added, n_layers = config["hidden_size"], config["hidden_size_per_layer_input"], 0
    streams, rank = config["altup_num_inputs"], config["laurel_rank"]
    flat = {**config, "intermediate_size": config["intermediate_size"][0]}
    for name, shape in gemma(flat):
        yield name, shape
        if not name.endswith("input_layernorm.weight"):
            continue
        prefix, n_layers = name.removesuffix(".input_layernorm.weight"), n_layers + 1
        for part in ("q", "k"):
            yield f"{prefix}.self_attn.{part}_norm.weight", (config["head_dim"],)
        yield f"{prefix}.altup.correct_output_scale", (hidden,)
        yield f"{prefix}.altup.correction_coefs.weight", (streams, streams)
        yield f"{prefix}.altup.prediction_coefs.weight", (streams**2, streams)
        yield f"{prefix}.altup.modality_router.weight", (streams, hidden)
        yield f"{prefix}.altup.router_norm.weight", (hidden,)
        yield f"{prefix}.laurel.linear_left.weight", (rank, hidden)
        yield f"{prefix}.laurel.linear_right.weight", (hidden, rank)
        yield f"{prefix}.laurel.post_laurel_norm.weight", (hidden,)
        yield f"{prefix}.per_layer_input_gate.weight", (added, hidden)
        yield f"{prefix}.per_layer_projection.weight", (hidden, added)
        yield f"{prefix}.post_per_layer_input_norm.weight", (hidden,)
    for number in range(streams - 1):
        yield f"model.altup_projections.{number}.weight", (hidden, hidden)
        yield f"model.altup_unembed_projections.{number}.weight", (hidden, hidden)
    rows = n_layers * added
    yield "model.embed_tokens_per_layer.weight", (config["vocab_size_per_layer_input"], rows)
    yield "model.per_layer_model_projection.weight", (rows, hidden)
    yield "model.per_layer_projection_norm.weight", (added,)


GEMMA3N: Mapping[str, Published] = {
    "gemma-3n": Published(
        {"model_type": "gemma3n_text", "vocab_size": 515, "vocab_size_per_layer_input": 507,
         "hidden_size": 64, "intermediate_size": [96] * 22, "num_hidden_layers": 22, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
         "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": None, "sliding_window": 16,
         "layer_types": [*[*["sliding_attention"] * 4, "full_attention"] * 4, "sliding_attention",
                         "full_attention"],
         "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 256, "laurel_rank": 64,
         "altup_active_idx": 0, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_num_inputs": 4,
         "altup_lr_multiplier": 1.0, "activation_sparsity_pattern": [*[0.95] * 10, *[0.0] * 12],
         "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
         "attention_dropout": 0.0, "tie_word_embeddings": True, "use_cache": True, "torch_dtype": "bfloat16"},
        gemma3n, "sentencepiece", beside_vision,
        around={"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n",
                "eos_token_id": 1, "bos_token_id": 2, "unk_token_id": 0,
                "vision_config": {"model_type": "gemma3n_vision"},
                "audio_config": {"model_type": "gemma3n_audio"}, "vision_soft_tokens_per_image": 256,
                "audio_soft_tokens_per_image": 188},
        extra={"model.vision_tower.timm_model.conv_stem.conv.weight": (4, 4),
               "model.embed_vision.embedding_projection.weight": (4, 4),
               "model.audio_tower.conformer.0.norm.weight": (4,),
               "model.embed_audio.embedding_projection.weight": (4, 4)},
    ),
}  # fmt: skip
