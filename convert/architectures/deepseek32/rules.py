"""The tensors of DeepSeek V3.2: those of V3, and in the layers that have one the indexer's."""

from __future__ import annotations

from collections.abc import Iterator

from convert.architectures.deepseek2.options import Options
from convert.architectures.deepseek2.places import layers
from convert.architectures.deepseek2.rules import RULES as DEEPSEEK_RULES
from convert.architectures.deepseek32.config import IndexedConfig
from convert.architectures.rules import Output, Rule

_INDEXER = (
    Output("blk.{layer}.indexer.k_norm.bias", "model.layers.{layer}.self_attn.indexer.k_norm.bias",
           "index_head_dim"),
    Output("blk.{layer}.indexer.k_norm.weight", "model.layers.{layer}.self_attn.indexer.k_norm.weight",
           "index_head_dim"),
    Output("blk.{layer}.indexer.proj.weight", "model.layers.{layer}.self_attn.indexer.weights_proj.weight",
           "index_n_heads hidden_size"),
    Output("blk.{layer}.indexer.attn_k.weight", "model.layers.{layer}.self_attn.indexer.wk.weight",
           "index_head_dim hidden_size"),
    Output("blk.{layer}.indexer.attn_q_b.weight", "model.layers.{layer}.self_attn.indexer.wq_b.weight",
           "index_q_rows q_lora_rank"),
)  # fmt: skip


def _with_indexer(config: IndexedConfig, options: Options) -> Iterator[int]:
    return (layer for layer in layers(config, options) if config.has_indexer(layer))


def _perhaps_with_indexer(config: IndexedConfig, options: Options) -> Iterator[int]:
    return (layer for layer in layers(config, options) if not config.has_indexer(layer))


RULES: tuple[Rule, ...] = (
    *DEEPSEEK_RULES,
    *(Rule(_with_indexer, (output,)) for output in _INDEXER),
    *(Rule(_perhaps_with_indexer, (output,), optional=True) for output in _INDEXER),
)
