"""Bytes of KV cache that a model needs for each token of context.

Plain attention keeps the keys and values of every KV head. Multi-head latent attention (MLA) keeps one
latent vector for all heads, from which keys and values are computed, and the rotated part of the key.
DeepSeek-V3: 61 layers x (512 + 64) numbers, against 61 x 128 heads x (192 + 128) if it kept its heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf_tools.format.hparams import Size, architecture_of, known_hparams
from gguf_tools.format.reader import GGUFSource

BYTES_PER_NUMBER = 2
"""Size of a number in a 16-bit cache."""


@dataclass(frozen=True)
class KVCache:
    """Bytes per token of a 16-bit cache; None where it is not known, or doesn't apply."""

    plain: int | None
    mla: int | None


def kv_cache(source: GGUFSource) -> KVCache:
    """Return the bytes per token, computed from the hyper-parameters in the metadata."""
    architecture = architecture_of(source.metadata)
    if architecture is None:
        return KVCache(None, None)
    hparams = known_hparams(source.metadata, architecture)
    n_blocks = _positive(hparams.block_count)
    if n_blocks is None:
        return KVCache(None, None)
    n_layers = max(0, n_blocks - (_positive(hparams.nextn_predict_layers) or 0))
    lora_rank, rope_dims = _positive(hparams.kv_lora_rank), _positive(hparams.rope_dimension_count)
    n_heads = _positive(hparams.head_count)
    key_length, value_length = _positive(hparams.key_length), _positive(hparams.value_length)

    if lora_rank and rope_dims:
        # With 3-D MLA tensors key_length is that of the cache, and key_length_mla that of a head.
        head_key = _positive(hparams.key_length_mla) or key_length
        head_value = _positive(hparams.value_length_mla) or value_length
        mla = n_layers * (lora_rank + rope_dims) * BYTES_PER_NUMBER
        if not (n_heads and head_key and head_value):
            return KVCache(None, mla)
        return KVCache(n_layers * n_heads * (head_key + head_value) * BYTES_PER_NUMBER, mla)

    embedding = _positive(hparams.embedding_length)
    if n_heads and embedding:
        key_length = key_length or embedding // n_heads
        value_length = value_length or embedding // n_heads
    has_kv_heads = hparams.key("head_count_kv") in source.metadata
    n_kv_heads = _heads_of_all_layers(hparams.head_count_kv if has_kv_heads else n_heads, n_layers)
    if not key_length or not value_length or n_kv_heads is None:
        return KVCache(None, None)
    return KVCache(n_kv_heads * (key_length + value_length) * BYTES_PER_NUMBER, None)


def _positive(size: Size) -> int | None:
    """Return a size that holds for all layers, None for any other or for 0."""
    return size if isinstance(size, int) and size > 0 else None


def _heads_of_all_layers(heads: Size, n_layers: int) -> int | None:
    """Return the KV heads of all layers together; None where they are not known."""
    if isinstance(heads, tuple):
        return sum(heads[:n_layers])
    return None if heads is None else heads * n_layers
