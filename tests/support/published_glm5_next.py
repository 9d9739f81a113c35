"""A small checkpoint of GLM-5 Next, and its shapes; see tests/support/published_models.py."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.published_checkpoint import COMMON, Published
from tests.support.published_kimi import kimi_delta
from tests.support.published_shapes import Config, Shapes, latent


def glm5_next(config: Config) -> Shapes:
    """Yield the tensors of a GLM-5 Next: layers of KDA, indexers of pools, mixers of streams."""
    net, hidden, heads = config["linear_attn_config"], config["hidden_size"], config["num_attention_heads"]
    n_layers, cols = config["num_hidden_layers"], config["index_head_dim"]
    kinds = config["layer_types"]
    for name, shape in latent(config):
        layer, _, part = name.partition(".self_attn.")
        number = int(layer.rpartition(".")[2]) if part else n_layers
        if part and number < n_layers and kinds[number] == "linear_attention":
            if part == "o_proj.weight":
                size = net["short_conv_kernel_size"]
                for each, its in kimi_delta(f"{layer}.self_attn", hidden, heads, net["head_dim"], size):
                    yield each, (heads,) if each.endswith("A_log") else its
            continue
        yield name, shape
        if part == "indexer.weights_proj.weight":
            yield f"{layer}.self_attn.indexer.index_kpool_compress_gate", (cols, hidden)
            yield f"{layer}.self_attn.indexer.index_kpool_compress_ape", (config["index_kpool"], cols)
        if name.endswith(".input_layernorm.weight"):
            layer = name.removesuffix(".input_layernorm.weight")
            if int(layer.rpartition(".")[2]) < n_layers:
                for mixed in ("attn", "ffn"):
                    yield f"{layer}.hc_{mixed}_fn", (24, 4 * hidden)
                    yield f"{layer}.hc_{mixed}_base", (24,)
                    yield f"{layer}.hc_{mixed}_scale", (3,)


def glm5_next_models(tokens: Config) -> Mapping[str, Published]:
    """Return models with and without indexers that are shared; `tokens` are the fields about GLM's tokens."""
    kinds = ["full"] * 5
    return {
        "glm-5.3-flash": _model(tokens, kinds, index_topk=128),
        "glm-5.3-shared": _model(tokens, [*kinds[:4], "shared"], index_topk=16),
    }


def _model(tokens: Config, indexer_types: list[str], index_topk: int) -> Published:
    config: Config = {
        **COMMON, **tokens, "model_type": "glm5_next_text", "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"], "q_lora_rank": 48,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 0, "v_head_dim": 16,
        "mla_use_nope": True, "mhc": True, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "linear_attn_config": {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4,
                               "gate_lower_bound": -5.0, "safe_gate": True},
        "index_n_heads": 4, "index_head_dim": 32, "index_topk": index_topk, "index_kpool": 4,
        "index_kpool_always_select_tail": True,
        "indexer_types": indexer_types, "n_routed_experts": 6,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "swiglu_limit": 10.0,
        "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    config.pop("rope_theta")
    return Published(
        config, glm5_next, "glm-4.7-flash",
        around={"architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next",
                "vision_config": {"model_type": "glm5_next_vision"}, "image_token_id": 3},
        prefix="", extra={"model.visual.patch_embed.proj.weight": (4, 4)},
    )  # fmt: skip
