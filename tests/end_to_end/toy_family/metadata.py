"""The keys toy.*"""

from __future__ import annotations

from convert.architectures.base import Key
from gguf_tools.format import keys
from gguf_tools.format.values import Value

METADATA: tuple[Key, ...] = (
    Key(keys.BLOCK_COUNT, Value.u32, lambda c, o: c.num_hidden_layers),
    Key(keys.CONTEXT_LENGTH, Value.u32, lambda c, o: c.max_position_embeddings),
    Key(keys.EMBEDDING_LENGTH, Value.u32, lambda c, o: c.hidden_size),
    Key(keys.FEED_FORWARD_LENGTH, Value.u32, lambda c, o: c.intermediate_size),
    Key(keys.HEAD_COUNT, Value.u32, lambda c, o: c.num_attention_heads),
    Key(keys.HEAD_COUNT_KV, Value.u32, lambda c, o: c.num_key_value_heads),
    Key(keys.LAYERNORM_RMS_EPS, Value.f32, lambda c, o: c.rms_norm_eps),
    Key(keys.ROPE_DIMENSION_COUNT, Value.u32, lambda c, o: c.head_dim),
)
