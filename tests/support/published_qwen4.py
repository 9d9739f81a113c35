"""A small checkpoint of Qwen4Exp, and its shapes; see published_models.py."""

from __future__ import annotations

from tests.support.published_checkpoint import Published, with_ngrams
from tests.support.published_shapes import Config, Shapes, delta_net

_QWEN4: Config = {
    "hc_count": 2, "hc_lowrank": 16, "ple_layer_ids": [2], "ple_embed_dim": None, "ple_conv_kernel_size": 4,
    "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 59, "split_ngram_parts": 4,
    "make_ngram_vocab_size_divisible_by": 128, "seed": 1234, "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": 16, "indexer_budget": 32, "indexer_compress_ratio": 4, "output_gate_type": "sigmoid",
    "mtp_num_hidden_layers": 1, "norm_topk_prob": True,
}  # fmt: skip
"""What Qwen4Exp has besides delta nets and experts."""


def qwen4exp(config: Config) -> Shapes:
    """Yield the tensors of a Qwen4Exp: strands in place of norms, indexers, a table of n-grams in parts."""
    hidden, n_strands = config["hidden_size"], config["hc_count"]
    wide = hidden * n_strands
    heads = (config["ngram_size"] - 1) * config["heads_per_ngram"]

    def mixer(prefix: str) -> Shapes:
        yield f"{prefix}.hc_norm.weight", (wide,)
        yield f"{prefix}.input_mix_weight_down.weight", (config["hc_lowrank"], wide)
        yield f"{prefix}.input_mix_weight_up.weight", (wide, config["hc_lowrank"])

    for name, shape in delta_net(config):
        prefix = name.partition(".self_attn")[0].partition(".linear_attn")[0]
        if name.endswith("input_layernorm.weight") and not name.startswith("mtp."):
            prefix = name.removesuffix(".input_layernorm.weight")
            for part in ("attn", "mlp"):
                yield from mixer(f"{prefix}.{part}_hyper_connection")
                yield f"{prefix}.{part}_hyper_connection.block_inject_weight.weight", (n_strands, wide)
        elif name == "model.norm.weight":
            yield from mixer("model.hyper_connection_mixer")
        elif not name.endswith("layernorm.weight") or name.startswith("mtp."):
            yield name, shape
        if name.endswith("self_attn.k_norm.weight") and not name.startswith("mtp."):
            cols, indexer = config["indexer_head_dim"], f"{prefix}.self_attn.indexer"
            yield f"{indexer}.index_qk_proj.weight", ((config["indexer_n_heads"] + 1) * cols, hidden)
            yield f"{indexer}.q_layernorm.weight", (cols,)
            yield f"{indexer}.k_layernorm.weight", (cols,)
    ple = f"model.layers.{config['ple_layer_ids'][0] - 1}.ple"
    for part in range(config["split_ngram_parts"]):
        yield f"{ple}.ple_embedding.ngram_embedding.shard_{part}.weight", (64, hidden // heads)
    yield f"{ple}.ple_embedding.layer_multipliers", (config["ngram_size"],)
    yield f"{ple}.ple_embedding.ngram_heads_offsets", (heads,)
    yield f"{ple}.ple_embedding.ngram_heads_vocab_sizes", (heads,)
    yield f"{ple}.key_proj.weight", (wide, hidden)
    yield f"{ple}.value_proj.weight", (hidden, hidden)
    for norm in ("norm_key", "norm_query", "norm_conv"):
        yield f"{ple}.{norm}.weight", (wide,)
    yield f"{ple}.conv1d.weight", (wide, 1, config["ple_conv_kernel_size"])


def qwen4_model(base: Config) -> Published:
    """Return the model, whose delta nets, experts and rotation are those of a Qwen 3.5."""
    config = {key: value for key, value in base.items() if key != "intermediate_size"} | _QWEN4
    layers = [*["linear_attention"] * 3, "full_attention"]
    return Published(
        {**config, "model_type": "qwen4_exp_text", "layer_types": layers},
        qwen4exp, "qwen3moe", with_ngrams,
        around={"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp",
                "vision_config": {"depth": 1}, "tie_word_embeddings": False, "image_token_id": 600},
        extra={"model.visual.patch_embed.proj.weight": (4, 4)}, cutting="qwen35",
    )  # fmt: skip
