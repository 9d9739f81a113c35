"""Names and shapes of the tensors of published models, by what their config.json says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Config = dict[str, Any]
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _mlp(prefix: str, width: int, hidden: int, names: tuple[str, str, str]) -> Shapes:
    gate, up, down = names
    yield f"{prefix}.{gate}.weight", (width, hidden)
    yield f"{prefix}.{up}.weight", (width, hidden)
    yield f"{prefix}.{down}.weight", (hidden, width)


_PROJ = ("gate_proj", "up_proj", "down_proj")


def _ends(config: Config) -> Shapes:
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _mtp(prefix: str, hidden: int) -> Shapes:
    """Yield what an MTP layer has besides the rest, without embeddings and output matrix, as in GLM-4.6."""
    yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{prefix}.{norm}.weight", (hidden,)


def _experts(prefix: str, config: Config) -> Shapes:
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    yield f"{prefix}.gate.weight", (config["n_routed_experts"], hidden)
    yield f"{prefix}.gate.e_score_correction_bias", (config["n_routed_experts"],)
    for expert in range(config["n_routed_experts"]):
        yield from _mlp(f"{prefix}.experts.{expert}", width, hidden, _PROJ)
    yield from _mlp(f"{prefix}.shared_experts", config["n_shared_experts"] * width, hidden, _PROJ)


def latent(config: Config) -> Shapes:
    """Yield the tensors of a relative of DeepSeek V3."""
    yield from _ends(config)
    heads, hidden, q_lora = config["num_attention_heads"], config["hidden_size"], config["q_lora_rank"]
    nope, rope, value = (config[f"{part}_head_dim"] for part in ("qk_nope", "qk_rope", "v"))
    kv_lora, n_layers = config["kv_lora_rank"], config["num_hidden_layers"]
    kinds = config.get("indexer_types")
    for layer in range(n_layers + config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if q_lora is None:
            yield f"{attention}.q_proj.weight", (heads * (nope + rope), hidden)
        else:
            yield f"{attention}.q_a_proj.weight", (q_lora, hidden)
            yield f"{attention}.q_a_layernorm.weight", (q_lora,)
            yield f"{attention}.q_b_proj.weight", (heads * (nope + rope), q_lora)
        yield f"{attention}.kv_a_proj_with_mqa.weight", (kv_lora + rope, hidden)
        yield f"{attention}.kv_a_layernorm.weight", (kv_lora,)
        yield f"{attention}.kv_b_proj.weight", (heads * (nope + value), kv_lora)
        yield f"{attention}.o_proj.weight", (hidden, heads * value)
        if kinds is not None and (layer >= len(kinds) or kinds[layer] == "full"):
            n_heads, n_cols = config["index_n_heads"], config["index_head_dim"]
            yield f"{attention}.indexer.wq_b.weight", (n_heads * n_cols, q_lora)
            yield f"{attention}.indexer.wk.weight", (n_cols, hidden)
            yield f"{attention}.indexer.k_norm.weight", (n_cols,)
            yield f"{attention}.indexer.k_norm.bias", (n_cols,)
            yield f"{attention}.indexer.weights_proj.weight", (n_heads, hidden)
        if "n_routed_experts" not in config or layer < config["first_k_dense_replace"]:
            yield from _mlp(f"{prefix}.mlp", config["intermediate_size"], hidden, _PROJ)
        else:
            yield from _experts(f"{prefix}.mlp", config)
        if layer >= n_layers:
            yield from _mtp(prefix, hidden)


def decoder(config: Config) -> Shapes:
    """Yield the tensors of an ordinary decoder: Mistral, GLM-4.6, MiniMax-M2."""
    yield from _ends(config)
    heads, kv_heads, hidden = (config[key] for key in (
        "num_attention_heads", "num_key_value_heads", "hidden_size",
    ))  # fmt: skip
    cols, n_layers = config["head_dim"] or hidden // heads, config["num_hidden_layers"]
    for layer in range(n_layers + config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        for part, rows in (("q", heads * cols), ("k", kv_heads * cols), ("v", kv_heads * cols)):
            yield f"{prefix}.self_attn.{part}_proj.weight", (rows, hidden)
            if config["attention_bias"]:
                yield f"{prefix}.self_attn.{part}_proj.bias", (rows,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads * cols)
        if config.get("use_qk_norm"):
            every = config.get("qk_norm_type") == "per_layer"
            yield f"{prefix}.self_attn.q_norm.weight", (heads * cols if every else cols,)
            yield f"{prefix}.self_attn.k_norm.weight", (kv_heads * cols if every else cols,)
        if "num_local_experts" in config:
            block = f"{prefix}.block_sparse_moe"
            yield f"{block}.gate.weight", (config["num_local_experts"], hidden)
            yield f"{block}.e_score_correction_bias", (config["num_local_experts"],)
            for expert in range(config["num_local_experts"]):
                width = config["intermediate_size"]
                yield from _mlp(f"{block}.experts.{expert}", width, hidden, ("w1", "w3", "w2"))
        elif layer < config.get("first_k_dense_replace", n_layers):
            yield from _mlp(f"{prefix}.mlp", config["intermediate_size"], hidden, _PROJ)
        else:
            yield from _experts(f"{prefix}.mlp", config)
        if layer >= n_layers:
            yield from _mtp(prefix, hidden)


def qwen(config: Config) -> Shapes:
    """Yield the tensors of a Qwen: Qwen 3 norms per head; Qwen3-VL has experts as stacks, columns first."""
    for name, shape in decoder(
        config | {"use_qk_norm": "head_dim" in config, "head_dim": config.get("head_dim")}
    ):
        n_experts, hidden = config.get("num_experts"), config["hidden_size"]
        if not n_experts or ".mlp." not in name:
            yield name, shape
        elif ".gate_proj." in name:
            width, block = config["moe_intermediate_size"], name.partition(".mlp.")[0] + ".mlp"
            yield f"{block}.gate.weight", (n_experts, hidden)
            yield f"{block}.experts.gate_up_proj", (n_experts, hidden, 2 * width)
            yield f"{block}.experts.down_proj", (n_experts, width, hidden)


def mixture(config: Config) -> Shapes:
    """Yield the tensors of a Qwen2-MoE or OLMoE: experts one by one, and a shared one with a gate."""
    hidden, shared = config["hidden_size"], config.get("shared_expert_intermediate_size")
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    for name, shape in decoder(config):
        if ".mlp." not in name:
            yield name, shape
        elif ".gate_proj." in name:
            block = name.partition(".mlp.")[0] + ".mlp"
            yield f"{block}.gate.weight", (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                yield from _mlp(f"{block}.experts.{expert}", width, hidden, _PROJ)
            if shared:
                yield from _mlp(f"{block}.shared_expert", shared, hidden, _PROJ)
                yield f"{block}.shared_expert_gate.weight", (1, hidden)


def cohere(config: Config) -> Shapes:
    """Yield the tensors of a Cohere 2, with experts or without: one norm a layer."""
    n_experts, hidden, width = config.get("num_experts"), config["hidden_size"], config["intermediate_size"]
    every = {key: value for key, value in config.items() if key != "first_k_dense_replace"}
    for name, shape in decoder(every):
        layer, _, part = name.partition(".mlp.")
        is_sparse = part and n_experts and int(layer.rpartition(".")[2]) >= config["first_k_dense_replace"]
        if "post_attention_layernorm" in name:
            continue
        if not is_sparse:
            rows = config.get("prefix_dense_intermediate_size") or width
            yield name, tuple(rows if part and size == width else size for size in shape)
        elif part == "gate_proj.weight":
            yield f"{layer}.mlp.gate.weight", (n_experts, hidden)
            for expert in range(n_experts):
                yield from _mlp(f"{layer}.mlp.experts.{expert}", width, hidden, _PROJ)
            shared = config["num_shared_experts"] * width
            yield from _mlp(f"{layer}.mlp.shared_experts", shared, hidden, _PROJ)


def bailing(config: Config) -> Shapes:
    """Yield the tensors of a Bailing MoE V2: queries, keys and values in one matrix."""
    cols = config["hidden_size"] // config["num_attention_heads"]
    every = {**config, "n_routed_experts": config["num_experts"], "n_shared_experts": 1}
    for name, shape in decoder(every):
        name = name.replace("embed_tokens", "word_embeddings").replace("self_attn.o_proj", "attention.dense")
        name = name.replace("e_score_correction_bias", "expert_bias")
        layer, _, part = name.partition(".self_attn.")
        if not part:
            yield name, shape
        elif part == "q_proj.weight":
            rows = shape[0] + 2 * config["num_key_value_heads"] * cols
            yield f"{layer}.attention.query_key_value.weight", (rows, shape[1])
            yield f"{layer}.attention.query_layernorm.weight", (cols,)
            yield f"{layer}.attention.key_layernorm.weight", (cols,)


def falcon_h1(config: Config) -> Shapes:
    """Yield the tensors of a Falcon-H1: attention and a Mamba 2 in every layer."""
    hidden, inner, n_heads = config["hidden_size"], config["mamba_d_ssm"], config["mamba_n_heads"]
    convolved = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    for name, shape in decoder(config):
        name = name.replace("model.norm.", "model.final_layernorm.").replace(".mlp.", ".feed_forward.")
        yield name.replace("post_attention_layernorm", "pre_ff_layernorm"), shape
        if "input_layernorm" in name:
            mamba = name.replace("input_layernorm.weight", "mamba")
            yield f"{mamba}.in_proj.weight", (inner + convolved + n_heads, hidden)
            yield f"{mamba}.conv1d.weight", (convolved, 1, config["mamba_d_conv"])
            yield f"{mamba}.conv1d.bias", (convolved,)
            for part in ("dt_bias", "A_log", "D"):
                yield f"{mamba}.{part}", (n_heads,)
            yield f"{mamba}.out_proj.weight", (hidden, inner)


def lfm2(config: Config) -> Shapes:
    """Yield the tensors of an LFM2: short convolutions and attention, dense blocks and experts."""
    hidden, vocab, heads = config["hidden_size"], config["vocab_size"], config["num_attention_heads"]
    cols, kernel, names = hidden // heads, config["conv_L_cache"], ("w1", "w3", "w2")
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.embedding_norm.weight", (hidden,)
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.operator_norm.weight", (hidden,)
        yield f"{prefix}.ffn_norm.weight", (hidden,)
        if kind == "conv":
            yield f"{prefix}.conv.conv.weight", (hidden, 1, kernel)
            yield f"{prefix}.conv.in_proj.weight", (3 * hidden, hidden)
            yield f"{prefix}.conv.out_proj.weight", (hidden, hidden)
        else:
            for part, n_heads in (("q", heads), *((part, config["num_key_value_heads"]) for part in "kv")):
                yield f"{prefix}.self_attn.{part}_proj.weight", (n_heads * cols, hidden)
            yield f"{prefix}.self_attn.out_proj.weight", (hidden, hidden)
            yield f"{prefix}.self_attn.q_layernorm.weight", (cols,)
            yield f"{prefix}.self_attn.k_layernorm.weight", (cols,)
        block = f"{prefix}.feed_forward"
        if layer < config.get("num_dense_layers", layer + 1):
            yield from _mlp(block, config["intermediate_size"], hidden, names)
            continue
        yield f"{block}.gate.weight", (config["num_experts"], hidden)
        yield f"{block}.expert_bias", (config["num_experts"],)
        for expert in range(config["num_experts"]):
            yield from _mlp(f"{block}.experts.{expert}", config["moe_intermediate_size"], hidden, names)


def gemma(config: Config) -> Shapes:
    """Yield the tensors of a Gemma 3: an ordinary decoder with norms behind attention and block."""
    for name, shape in decoder(config):
        yield name, shape
        if name.endswith(".post_attention_layernorm.weight"):
            for norm in ("pre", "post"):
                yield name.replace("post_attention", f"{norm}_feedforward"), shape


def olmo(config: Config) -> Shapes:
    """Yield the tensors of an OLMo 2 or 3: norms behind attention and block, and over all heads."""
    hidden = config["hidden_size"]
    for name, shape in decoder(config):
        if not name.endswith(".input_layernorm.weight"):
            yield name, shape
        if name.endswith(".post_attention_layernorm.weight"):
            yield name.replace("post_attention", "post_feedforward"), shape
            for part in ("q", "k"):
                rows = hidden // config["num_attention_heads"]
                rows *= config["num_attention_heads" if part == "q" else "num_key_value_heads"]
                yield name.replace("post_attention_layernorm", f"self_attn.{part}_norm"), (rows,)


def glm4(config: Config) -> Shapes:
    """Yield the tensors of a GLM-4: norms around attention and block, gate and up as one."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    for name, shape in decoder(config):
        if name.endswith(".gate_proj.weight"):
            yield name.replace("gate_proj", "gate_up_proj"), (2 * width, hidden)
        elif not name.endswith(".up_proj.weight"):
            yield name, shape
        if name.endswith(".input_layernorm.weight"):
            for norm in ("post_self_attn", "post_mlp"):
                yield name.replace("input", norm), shape


def hunyuan(config: Config) -> Shapes:
    """Yield the tensors of a Hunyuan: norms of queries and keys, and experts as in `mixture`."""
    width = config["intermediate_size"]
    widths = {"moe_intermediate_size": width, "shared_expert_intermediate_size": width}
    tensors = mixture if "moe_topk" in config else decoder
    for name, shape in tensors({**config, "use_qk_norm": True, **widths}):
        if "shared_expert_gate" in name:
            continue
        name = name.replace("q_norm", "query_layernorm").replace("k_norm", "key_layernorm")
        yield name.replace("mlp.gate.", "mlp.gate.wg.").replace("shared_expert.", "shared_mlp."), shape


def hy_v3(config: Config) -> Shapes:
    """Yield the tensors of a Hy V3, which has an MTP layer."""
    sizes = {"use_qk_norm": True, "n_routed_experts": config["num_experts"], "n_shared_experts": 1}
    for name, shape in decoder({**config, **sizes}):
        name = name.replace("mlp.gate.weight", "mlp.router.gate.weight")
        name = name.replace("mlp.gate.e_score_correction_bias", "mlp.expert_bias")
        name = name.replace("shared_experts", "shared_mlp").replace("shared_head.norm", "final_layernorm")
        yield name, shape


def exaone4(config: Config) -> Shapes:
    """Yield the tensors of an EXAONE 4: norms behind attention and block, none before."""
    for name, shape in decoder({**config, "use_qk_norm": True}):
        yield name.replace("input_layernorm", "post_feedforward_layernorm"), shape


def laguna(config: Config) -> Shapes:
    """Yield the tensors of a Laguna: heads by layer, a gate of attention, a bias beside the experts."""
    hidden, cols = config["hidden_size"], config["head_dim"]
    sizes = {"use_qk_norm": True, "n_routed_experts": config["num_experts"], "n_shared_experts": 1,
             "first_k_dense_replace": 1}  # fmt: skip
    for name, shape in decoder({**config, **sizes}):
        heads = config["num_attention_heads_per_layer"][int(name.split(".")[2])] if ".layers." in name else 0
        if name.endswith(".q_proj.weight"):
            yield name, (heads * cols, hidden)
            yield name.replace("q_proj", "g_proj"), (heads, hidden)
        elif name.endswith(".o_proj.weight"):
            yield name, (hidden, heads * cols)
        elif "shared_experts" in name:
            width = config["shared_expert_intermediate_size"]
            shape = (hidden, width) if "down_proj" in name else (width, hidden)
            yield name.replace("shared_experts", "shared_expert"), shape
        else:
            yield name.replace("gate.e_score", "experts.e_score"), shape


def starcoder2(config: Config) -> Shapes:
    """Yield the tensors of a StarCoder 2: biases everywhere, and blocks of two matrices."""
    for name, shape in decoder({**config, "attention_bias": True, "head_dim": None}):
        if ".mlp.up_proj" in name:
            continue
        name = name.replace(".gate_proj.", ".c_fc.").replace(".down_proj.", ".c_proj.")
        yield name, shape
        if "norm" in name or ".mlp." in name or ".o_proj." in name:
            yield name.replace(".weight", ".bias"), shape[:1]


def ernie(config: Config) -> Shapes:
    """Yield the tensors of an Ernie 4.5 with experts: a dense layer, then experts, chosen with a bias."""
    n_experts, hidden = config["moe_num_experts"], config["hidden_size"]
    width = config["moe_intermediate_size"]
    for name, shape in decoder(config):
        if ".layers.0." in name or ".mlp." not in name:
            yield name, shape
        elif ".gate_proj." in name:
            block = name.partition(".mlp.")[0] + ".mlp"
            yield f"{block}.gate.weight", (n_experts, hidden)
            yield f"{block}.moe_statics.e_score_correction_bias", (1, n_experts)
            for expert in range(n_experts):
                yield from _mlp(f"{block}.experts.{expert}", width, hidden, _PROJ)
            shared = width * config["moe_num_shared_experts"]
            yield from _mlp(f"{block}.shared_experts", shared, hidden, _PROJ)


def gemma4(config: Config) -> Shapes:
    """Yield the tensors of a Gemma 4, large or small, dense or with experts."""
    yield from _ends(config)
    hidden, added = config["hidden_size"], config["hidden_size_per_layer_input"]
    n_layers, n_shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    if added:
        rows = n_layers * added
        yield "model.embed_tokens_per_layer.weight", (config["vocab_size_per_layer_input"], rows)
        yield "model.per_layer_model_projection.weight", (rows, hidden)
        yield "model.per_layer_projection_norm.weight", (added,)
    for layer, kind in enumerate(config["layer_types"]):
        prefix, is_full = f"model.layers.{layer}", kind == "full_attention"
        cols = config["global_head_dim" if is_full else "head_dim"]
        heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
        keys = (config["num_global_key_value_heads"] or keys) if is_full else keys
        yield f"{prefix}.self_attn.q_proj.weight", (heads * cols, hidden)
        yield f"{prefix}.self_attn.q_norm.weight", (cols,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads * cols)
        if layer < n_layers - n_shared or layer == n_layers - 1:  # the last one's are stored and not used
            yield f"{prefix}.self_attn.k_proj.weight", (keys * cols, hidden)
            yield f"{prefix}.self_attn.k_norm.weight", (cols,)
            if not (is_full and config["attention_k_eq_v"]):
                yield f"{prefix}.self_attn.v_proj.weight", (keys * cols, hidden)
        is_wide = config["use_double_wide_mlp"] and layer >= n_layers - n_shared
        yield from _mlp(f"{prefix}.mlp", config["intermediate_size"] * (1 + is_wide), hidden, _PROJ)
        norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                 "post_feedforward_layernorm"]  # fmt: skip
        yield f"{prefix}.layer_scalar", (1,)
        if config["enable_moe_block"]:
            n_experts, width = config["num_experts"], config["moe_intermediate_size"]
            yield f"{prefix}.router.proj.weight", (n_experts, hidden)
            yield f"{prefix}.router.scale", (hidden,)
            yield f"{prefix}.router.per_expert_scale", (n_experts,)
            yield f"{prefix}.experts.gate_up_proj", (n_experts, 2 * width, hidden)
            yield f"{prefix}.experts.down_proj", (n_experts, hidden, width)
            norms += [f"{part}_feedforward_layernorm_{number}" for part, number in (
                ("pre", 2), ("post", 1), ("post", 2),
            )]  # fmt: skip
        if added:
            yield f"{prefix}.per_layer_input_gate.weight", (added, hidden)
            yield f"{prefix}.per_layer_projection.weight", (hidden, added)
            norms.append("post_per_layer_input_norm")
        for norm in norms:
            yield f"{prefix}.{norm}.weight", (hidden,)


def phi(config: Config) -> Shapes:
    """Yield the tensors of a Phi 3 or 4: queries, keys and values are one matrix, gate and up another."""
    yield from _ends(config)
    hidden, width = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.qkv_proj.weight", (heads * hidden // config["num_attention_heads"], hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}.mlp.gate_up_proj.weight", (2 * width, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, width)


def granite(config: Config) -> Shapes:
    """Yield the tensors of a Granite 3 or 4: experts in two stacks, a shared block, a Mamba 2."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    n_experts, shared = config.get("num_local_experts"), config.get("shared_intermediate_size")
    heads, inner = config.get("mamba_n_heads", 0), 2 * hidden
    convolved = inner + 2 * config.get("mamba_n_groups", 0) * config.get("mamba_d_state", 0)
    kinds = config.get("layer_types") or []
    plain = {key: value for key, value in config.items() if n_experts or key != "num_local_experts"}
    for name, shape in decoder(plain):
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        is_mamba = layer >= 0 and kinds[layer : layer + 1] == ["mamba"]
        is_replaced = (".mlp." in name and shared) or (".self_attn." in name and is_mamba)
        if is_replaced or ".block_sparse_moe." in name:
            continue
        yield name, shape
        if not name.endswith(".post_attention_layernorm.weight"):
            continue
        prefix = f"model.layers.{layer}"
        if is_mamba:
            yield f"{prefix}.mamba.in_proj.weight", (inner + convolved + heads, hidden)
            yield f"{prefix}.mamba.conv1d.weight", (convolved, 1, 4)
            yield f"{prefix}.mamba.conv1d.bias", (convolved,)
            for part in ("dt_bias", "A_log", "D"):
                yield f"{prefix}.mamba.{part}", (heads,)
            yield f"{prefix}.mamba.norm.weight", (inner,)
            yield f"{prefix}.mamba.out_proj.weight", (hidden, inner)
        if n_experts:
            yield f"{prefix}.block_sparse_moe.router.layer.weight", (n_experts, hidden)
            yield f"{prefix}.block_sparse_moe.input_linear.weight", (n_experts, 2 * width, hidden)
            yield f"{prefix}.block_sparse_moe.output_linear.weight", (n_experts, hidden, width)
        if shared:
            yield f"{prefix}.shared_mlp.input_linear.weight", (2 * shared, hidden)
            yield f"{prefix}.shared_mlp.output_linear.weight", (hidden, shared)


def nemotron(config: Config) -> Shapes:
    """Yield the tensors of a Nemotron-H: each layer is a Mamba 2, attention, a dense block or experts."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    yield "backbone.embeddings.weight", (vocab, hidden)
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        yield from _nemotron_layer(f"backbone.layers.{layer}", kind, config)
    yield "backbone.norm_f.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)
    if config.get("num_nextn_predict_layers"):
        yield "mtp.layers.0.eh_proj.weight", (hidden, 2 * hidden)
        yield "mtp.layers.0.enorm.weight", (hidden,)
        yield "mtp.layers.0.hnorm.weight", (hidden,)
        yield from _nemotron_layer("mtp.layers.0", "*", config)
        yield "mtp.layers.1.final_layernorm.weight", (hidden,)
        yield from _nemotron_layer("mtp.layers.1", "E", config)


def _nemotron_layer(prefix: str, kind: str, config: Config) -> Shapes:
    hidden, mixer = config["hidden_size"], f"{prefix}.mixer"
    yield f"{prefix}.norm.weight", (hidden,)
    if kind == "M":
        heads = config["mamba_num_heads"]
        inner = heads * config["mamba_head_dim"]
        convolved = inner + 2 * config["n_groups"] * config["ssm_state_size"]
        for part in ("A_log", "D", "dt_bias"):
            yield f"{mixer}.{part}", (heads,)
        yield f"{mixer}.conv1d.bias", (convolved,)
        yield f"{mixer}.conv1d.weight", (convolved, 1, config["conv_kernel"])
        yield f"{mixer}.in_proj.weight", (inner + convolved + heads, hidden)
        yield f"{mixer}.norm.weight", (inner,)
        yield f"{mixer}.out_proj.weight", (hidden, inner)
    elif kind == "*":
        queries, keys = (config["head_dim"] * config[f"num_{of}_heads"] for of in ("attention", "key_value"))
        for part, shape in (("q", (queries, hidden)), ("k", (keys, hidden)), ("v", (keys, hidden)),
                            ("o", (hidden, queries))):  # fmt: skip
            yield f"{mixer}.{part}_proj.weight", shape
    elif kind == "-":
        yield from _ungated(mixer, config["intermediate_size"], hidden)
    else:
        n_experts, latent_size = config["n_routed_experts"], config.get("moe_latent_size")
        if latent_size:
            yield f"{mixer}.fc1_latent_proj.weight", (latent_size, hidden)
            yield f"{mixer}.fc2_latent_proj.weight", (hidden, latent_size)
        for expert in range(n_experts):
            width = config["moe_intermediate_size"]
            yield from _ungated(f"{mixer}.experts.{expert}", width, latent_size or hidden)
        yield f"{mixer}.gate.e_score_correction_bias", (n_experts,)
        yield f"{mixer}.gate.weight", (n_experts, hidden)
        yield from _ungated(f"{mixer}.shared_experts", config["moe_shared_expert_intermediate_size"], hidden)


def _ungated(prefix: str, width: int, hidden: int) -> Shapes:
    yield f"{prefix}.down_proj.weight", (hidden, width)
    yield f"{prefix}.up_proj.weight", (width, hidden)


def delta_net(config: Config) -> Shapes:
    """Yield the tensors of a Qwen3-Next or a Qwen 3.5, with experts or without, and of its MTP layer."""
    yield from _ends(config)
    hidden, keys = config["hidden_size"], config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads = config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        net = f"{prefix}.linear_attn"
        if (layer + 1) % config["full_attention_interval"] == 0:
            yield from _gated_layer(prefix, config)
            continue
        if config["model_type"] == "qwen3_next":
            yield f"{net}.in_proj_qkvz.weight", (2 * keys + 2 * values, hidden)
            yield f"{net}.in_proj_ba.weight", (2 * heads, hidden)
        else:
            yield f"{net}.in_proj_qkv.weight", (2 * keys + values, hidden)
            yield f"{net}.in_proj_z.weight", (values, hidden)
            yield f"{net}.in_proj_b.weight", (heads, hidden)
            yield f"{net}.in_proj_a.weight", (heads, hidden)
        yield f"{net}.conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"])
        yield f"{net}.dt_bias", (heads,)
        yield f"{net}.A_log", (heads,)
        yield f"{net}.norm.weight", (config["linear_value_head_dim"],)
        yield f"{net}.out_proj.weight", (hidden, values)
        yield from _after_attention(prefix, config)
    yield "mtp.fc.weight", (hidden, 2 * hidden)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{norm}.weight", (hidden,)
    yield from _gated_layer("mtp.layers.0", config)


def _gated_layer(prefix: str, config: Config) -> Shapes:
    """Yield the tensors of a layer whose queries have a gate beside them."""
    hidden, cols = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * cols, config["num_key_value_heads"] * cols
    for part, shape in (
        ("q_proj", (2 * queries, hidden)), ("k_proj", (keys, hidden)), ("v_proj", (keys, hidden)),
        ("o_proj", (hidden, queries)), ("q_norm", (cols,)), ("k_norm", (cols,)),
    ):  # fmt: skip
        yield f"{prefix}.self_attn.{part}.weight", shape
    yield from _after_attention(prefix, config)


def _after_attention(prefix: str, config: Config) -> Shapes:
    """Yield the norms of a layer, and its dense block or its experts, stacked or one by one."""
    hidden, mlp = config["hidden_size"], f"{prefix}.mlp"
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    if "num_experts" not in config:
        yield from _mlp(mlp, config["intermediate_size"], hidden, _PROJ)
        return
    n_experts, width = config["num_experts"], config["moe_intermediate_size"]
    yield f"{mlp}.gate.weight", (n_experts, hidden)
    if config["model_type"] == "qwen3_next":
        for expert in range(n_experts):
            yield from _mlp(f"{mlp}.experts.{expert}", width, hidden, _PROJ)
    else:
        yield f"{mlp}.experts.gate_up_proj", (n_experts, 2 * width, hidden)
        yield f"{mlp}.experts.down_proj", (n_experts, hidden, width)
    yield from _mlp(f"{mlp}.shared_expert", config["shared_expert_intermediate_size"], hidden, _PROJ)
    yield f"{mlp}.shared_expert_gate.weight", (1, hidden)
