"""EmbeddingGemma as it is published, small, with and without its Dense modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tests.support.published_checkpoint import Published
from tests.support.published_shapes import gemma

_EMBEDDINGGEMMA = Published(
    {"architectures": ["Gemma3TextModel"], "model_type": "gemma3_text", "hidden_size": 64,
     "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2,
     "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "vocab_size": 543,
     "tie_word_embeddings": True, "attention_bias": False, "use_bidirectional_attention": True,
     "max_position_embeddings": 2048, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
     "use_qk_norm": True, "torch_dtype": "bfloat16"},
    gemma, "qwen3moe", lambda tensors: {n.removeprefix("model."): each for n, each in tensors.items()},
)  # fmt: skip

EMBEDDINGS: Mapping[str, Published] = {
    "embeddinggemma": _EMBEDDINGGEMMA,
    "embeddinggemma-dense": replace(_EMBEDDINGGEMMA, dense=((64, 192), (192, 64))),
}
