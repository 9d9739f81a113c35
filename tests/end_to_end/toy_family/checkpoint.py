"""A small checkpoint of the toy family, with a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes

from tests.end_to_end.toy_family.family import NAME
from tests.support.checkpoints import formula, write_checkpoint
from tests.support.tokenizer_files import copy_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": [NAME], "model_type": "toy", "vocab_size": 4096, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


def toy_checkpoint(folder: Path) -> Path:
    """Write a folder whose BF16 weights follow from a formula; return it."""
    tensors = {
        name: formula(shape, index).astype(ml_dtypes.bfloat16)
        for index, (name, shape) in enumerate(_shapes())
    }
    return copy_tokenizer("tiny", write_checkpoint(folder, CONFIG, tensors))


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    q_rows = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    kv_rows = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (q_rows, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_rows, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_rows, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_rows)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (width, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (width, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, width)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)
