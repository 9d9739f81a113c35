"""Small checkpoints of MiMo-V2, and their shapes; see tests/support/published_models.py."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.support.checkpoints import Tensors, quantize_fp8
from tests.support.published_checkpoint import COMMON, Published
from tests.support.published_shapes import _PROJ, Config, Shapes, _ends, _experts, _mlp, _mtp


def mimo(config: Config) -> Shapes:
    """Yield the tensors of a MiMo-V2: heads of keys by kind of layer, sinks in windows, three MTP layers."""
    yield from _ends(config)
    hidden, heads, n_layers = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    cols, values = config["head_dim"], config["v_head_dim"]
    for layer in range(n_layers + 3):
        is_mtp = layer >= n_layers
        prefix = f"model.mtp.layers.{layer - n_layers}" if is_mtp else f"model.layers.{layer}"
        windowed = is_mtp or config["hybrid_layer_pattern"][layer]
        kv_heads = config["swa_num_key_value_heads" if windowed else "num_key_value_heads"]
        rows = {"q": heads * cols, "k": kv_heads * cols, "v": kv_heads * values}
        for part, n_rows in (
            {"qkv": sum(rows.values())}.items() if config["model_type"] == "mimo_v2" else rows.items()
        ):
            yield f"{prefix}.self_attn.{part}_proj.weight", (n_rows, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads * values)
        if windowed:
            yield f"{prefix}.self_attn.attention_sink_bias", (heads,)
        if is_mtp or not config["moe_layer_freq"][layer]:
            yield from _mlp(f"{prefix}.mlp", config["intermediate_size"], hidden, _PROJ)
        else:
            every = _experts(f"{prefix}.mlp", {**config, "n_shared_experts": 0})
            yield from (pair for pair in every if "shared_experts" not in pair[0])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (hidden,)
        if is_mtp:
            every = _mtp(prefix, hidden)
            yield from ((name.replace("shared_head.norm", "final_layernorm"), shape) for name, shape in every)


def with_fp8_parts(tensors: Tensors) -> Tensors:
    """Return the tensors with qkv_proj in FP8, in four parts that have blocks of their own."""
    packed: Tensors = {}
    for name, weight in tensors.items():
        if not name.endswith("qkv_proj.weight"):
            packed[name] = weight
            continue
        parts = [quantize_fp8(part, (128, 128)) for part in np.split(weight.astype(np.float32), 4)]
        packed[name], packed[f"{name}_scale_inv"] = map(np.concatenate, zip(*parts, strict=True))
    return packed


_MIMO: Config = {
    **{key: value for key, value in COMMON.items() if key != "rms_norm_eps"}, "vocab_size": 640,
    "bos_token_id": None, "eos_token_id": 538, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 24, "v_head_dim": 16,
    "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 24, "swa_v_head_dim": 16,
    "layernorm_epsilon": 1e-5, "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334,
    "hybrid_block_size": None, "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1],
    "sliding_window": 16, "sliding_window_size": 16, "attention_chunk_size": 16,
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.707, "n_routed_experts": 6, "n_shared_experts": None, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": None,
}  # fmt: skip

MIMO_MODELS: Mapping[str, Published] = {
    "mimo-v2-flash": Published(
        {**_MIMO, "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash"},
        mimo, "qwen3moe",
    ),
    "mimo-v2.5": Published(
        {**_MIMO, "architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "vision_config": {},
         "audio_config": {}, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
                                                     "weight_block_size": [128, 128]}},
        mimo, "qwen3moe", edit=with_fp8_parts, extra={"visual.merger.weight": (8, 8)},
    ),
}  # fmt: skip
