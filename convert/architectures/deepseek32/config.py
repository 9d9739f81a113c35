"""IndexedConfig: the configuration of a model whose attention sees only what an indexer chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from convert.architectures.config_reader import ConfigReader
from convert.architectures.deepseek2.config import GLM_DSA, V32, DeepseekConfig, Indexer

_HEADS: Mapping[str, int] = {V32: 64, GLM_DSA: 32}
"""Architecture -> index_n_heads where config.json has none, as in transformers 5.23."""
_WORDS, _LETTERS = ("full", "shared"), ("F", "S")
"""Layers with an indexer of their own and without one, in a list and in a string."""


@dataclass(frozen=True)
class IndexedConfig(DeepseekConfig):
    """DeepSeek's configuration and that of the indexer.

    index_n_heads, index_head_dim  heads of the indexer and the columns of each
    index_topk     how many positions it chooses
    indexer_types  per layer whether it has an indexer of its own or uses the choice of a layer before it;
                   None where every layer has one
    states_mtp     whether config.json says how many MTP layers there are, be it 0
    """

    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    indexer_types: tuple[bool, ...] | None = None
    states_mtp: bool = True

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], path: str | Path = "config.json") -> IndexedConfig:
        """Return the configuration in `raw`, the content of `path`; raises as DeepseekConfig's does."""
        base = DeepseekConfig.from_dict(raw, path)
        read = ConfigReader(raw, path)
        if base.q_lora_rank is None:
            raise read.bad("q_lora_rank", "a whole number: the indexer sees compressed queries")
        head_dim = read.size("index_head_dim", 128)
        if head_dim < base.qk_rope_head_dim:
            raise read.bad("index_head_dim", f"at least qk_rope_head_dim ({base.qk_rope_head_dim})")
        return cls(
            **{field.name: getattr(base, field.name) for field in fields(base)},
            index_n_heads=read.size("index_n_heads", _HEADS[base.architecture]),
            index_head_dim=head_dim,
            index_topk=read.size("index_topk", 2048),
            indexer_types=_indexer_types(read, base),
            states_mtp="num_nextn_predict_layers" in raw or "num_mtp_layers" in raw,
        )

    @property
    def index_q_rows(self) -> int:
        return self.index_n_heads * self.index_head_dim

    @property
    def indexer(self) -> Indexer:
        """What chooses the positions that tokens attend to, in all layers but those of MTP."""
        layers = tuple(bool(self.has_indexer(layer)) for layer in range(self.num_hidden_layers))
        return Indexer(self.index_n_heads, self.index_head_dim, self.index_topk, layers)

    def has_indexer(self, layer: int) -> bool | None:
        """Return whether a layer has an indexer, None for an MTP layer of which nothing is said."""
        if self.indexer_types is None:
            return True
        return self.indexer_types[layer] if layer < len(self.indexer_types) else None


def _indexer_types(read: ConfigReader, base: DeepseekConfig) -> tuple[bool, ...] | None:
    """Return what GLM's config.json says in one of three ways, the first that is there."""
    n_layers = base.num_hidden_layers
    if base.architecture != GLM_DSA:
        return None
    key = "indexer_types" if read.raw.get("indexer_types") is not None else "index_topk_pattern"
    kinds = read.raw.get(key)
    if kinds is not None:
        words = _LETTERS if isinstance(kinds, str) else _WORDS
        lengths = range(n_layers, n_layers + base.num_nextn_predict_layers + 1)
        fits = isinstance(kinds, (list, str)) and len(kinds) in lengths
        if not fits or any(kind not in words for kind in kinds):
            raise read.bad(key, f"{' or '.join(words)} for each of {n_layers} layers")
        return tuple(kind == words[0] for kind in kinds)
    frequency = read.size("index_topk_freq", 1)
    offset = read.size("index_skip_topk_offset", 2, least=0)
    types = tuple(max(layer - offset + 1, 0) % frequency == 0 for layer in range(n_layers))
    return None if all(types) else types
