"""How many bytes of KV cache a model needs for each token of context.

Plain attention keeps keys and values of every KV head. Multi-head latent attention (MLA) keeps, once for
all heads, the latent vector that both are computed from and the rotated part of the key. DeepSeek-V3: 61
layers x (512 + 64) numbers, against 61 x 128 heads x (192 + 128) if its heads were kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf_tools import keys
from gguf_tools.reader import GGUFSource

BYTES_PER_NUMBER = 2
"""Of a 16-bit cache."""


@dataclass(frozen=True)
class KVCache:
    """Bytes per token of a 16-bit cache; None where the metadata don't say enough, or don't apply."""

    plain: int | None
    mla: int | None


def kv_cache(source: GGUFSource) -> KVCache:
    """Return the bytes per token, computed from the hyper-parameters in the metadata."""
    arch = source.get(keys.ARCHITECTURE)

    def number(key: str) -> int | None:
        value = source.get(key.format(arch=arch))
        return value if isinstance(value, int) and value > 0 else None

    n_blocks = number(keys.BLOCK_COUNT)
    if not isinstance(arch, str) or n_blocks is None:
        return KVCache(None, None)
    n_layers = max(0, n_blocks - (number(keys.NEXTN_PREDICT_LAYERS) or 0))
    lora_rank, rope_dims = number(keys.KV_LORA_RANK), number(keys.ROPE_DIMENSION_COUNT)
    n_heads = number(keys.HEAD_COUNT)
    key_length, value_length = number(keys.KEY_LENGTH), number(keys.VALUE_LENGTH)
    embedding = number(keys.EMBEDDING_LENGTH)

    if lora_rank and rope_dims:
        # With 3-D MLA tensors key_length is that of the cache, and key_length_mla that of a head.
        head_key = number(keys.KEY_LENGTH_MLA) or key_length
        head_value = number(keys.VALUE_LENGTH_MLA) or value_length
        mla = n_layers * (lora_rank + rope_dims) * BYTES_PER_NUMBER
        if not (n_heads and head_key and head_value):
            return KVCache(None, mla)
        return KVCache(n_layers * n_heads * (head_key + head_value) * BYTES_PER_NUMBER, mla)

    if n_heads and embedding:
        key_length = key_length or embedding // n_heads
        value_length = value_length or embedding // n_heads
    n_kv_heads = _heads_of_all_layers(source.get(keys.HEAD_COUNT_KV.format(arch=arch), n_heads), n_layers)
    if not key_length or not value_length or n_kv_heads is None:
        return KVCache(None, None)
    return KVCache(n_kv_heads * (key_length + value_length) * BYTES_PER_NUMBER, None)


def _heads_of_all_layers(heads: object, n_layers: int) -> int | None:
    """Add up KV heads, given for all layers alike or one by one; None if they are no numbers."""
    if isinstance(heads, int):
        return heads * n_layers
    if isinstance(heads, tuple) and all(isinstance(count, int) for count in heads):
        return sum(heads[:n_layers])
    return None
