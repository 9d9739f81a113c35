"""Families whose layers attend only to what an indexer chooses; DeepSeek V3.2, llama.cpp's `deepseek32`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.rules import layers, mtp_layers
from convert.architectures.deepseek2.config import DeepseekConfig, Defaults, Indexer, deepseek_fields
from convert.architectures.deepseek2.family import RULES as DEEPSEEK_RULES
from convert.architectures.deepseek2.family import common_notes, relative
from convert.architectures.deepseek2.metadata import METADATA as DEEPSEEK_METADATA
from convert.architectures.deepseek2.metadata import read_deepseek_file
from convert.architectures.options import LatentOptions
from convert.architectures.rules import Output, Rule
from convert.tokenizer.files import Quirks
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value

V32 = "DeepseekV32ForCausalLM"
_WORDS, _LETTERS = ("full", "shared"), ("F", "S")
"""Layers with an indexer of their own and without one, in a list and in a string."""

_INDEXED = "indexed_attention"
"""The one value of layer_types."""


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
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        path: str | Path = "config.json",
        defaults_of: Mapping[str, Defaults] = MappingProxyType({V32: Defaults()}),
    ) -> IndexedConfig:
        """Return the configuration in `raw`, the content of `path`; raises as DeepseekConfig's does."""
        read = ConfigReader(raw, path)
        fields = deepseek_fields(read, defaults_of)
        defaults = defaults_of[fields["architecture"]]
        if fields["q_lora_rank"] is None:
            raise read.bad("q_lora_rank", "a whole number: the indexer sees compressed queries")
        head_dim, rotated = read.size("index_head_dim", 128), fields["rotated_cols"]
        if head_dim < rotated:
            raise read.bad("index_head_dim", f"at least qk_rope_head_dim ({rotated})")
        if head_dim % 64:
            raise read.bad("index_head_dim", "a multiple of 64: llama.cpp rotates so many columns together")
        n_layers, n_mtp = fields["num_hidden_layers"], fields["num_nextn_predict_layers"]
        read.fixed("layer_types", [_INDEXED] * n_layers, "llama.cpp has an indexer in every layer")
        return cls(
            **fields,
            index_n_heads=read.size("index_n_heads", defaults.index_heads),
            index_head_dim=head_dim,
            index_topk=read.size("index_topk", 2048),
            indexer_types=read_indexer_types(read, n_layers, n_mtp) if defaults.may_share else None,
            states_mtp="num_nextn_predict_layers" in raw or "num_mtp_layers" in raw,
        )

    @property
    def index_q_rows(self) -> int:
        return self.index_n_heads * self.index_head_dim

    @property
    def indexer(self) -> Indexer:
        """Indexer that chooses the positions that tokens attend to, in all layers but those of MTP."""
        layers = tuple(bool(self.has_indexer(layer)) for layer in range(self.num_hidden_layers))
        return Indexer(self.index_n_heads, self.index_head_dim, self.index_topk, layers)

    def has_indexer(self, layer: int) -> bool | None:
        """Return whether a layer has an indexer, None for an MTP layer of which nothing is said."""
        if self.indexer_types is None:
            return True
        return self.indexer_types[layer] if layer < len(self.indexer_types) else None


def read_indexer_types(read: ConfigReader, n_layers: int, n_mtp: int) -> tuple[bool, ...] | None:
    """Read which layers have an indexer, which GLM's config.json says in one of three ways; None for all."""
    key = "indexer_types" if read.raw.get("indexer_types") is not None else "index_topk_pattern"
    kinds = read.raw.get(key)
    if kinds is not None:
        read.overruled("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
        words = _LETTERS if isinstance(kinds, str) else _WORDS
        lengths = range(n_layers, n_layers + n_mtp + 1)
        fits = isinstance(kinds, (list, str)) and len(kinds) in lengths
        if not fits or any(kind not in words for kind in kinds):
            raise read.bad(key, f"{' or '.join(words)} for each of {n_layers} layers")
        return tuple(kind == words[0] for kind in kinds)
    frequency = read.size("index_topk_freq", 1)
    offset = read.size("index_skip_topk_offset", 2, least=0)
    types = tuple(max(layer - offset + 1, 0) % frequency == 0 for layer in range(n_layers))
    return None if all(types) else types


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


def _with_indexer(config: IndexedConfig, options: LatentOptions) -> Iterator[int]:
    return (layer for layer in layers(config, options) if config.has_indexer(layer))


def _perhaps_with_indexer(config: IndexedConfig, options: LatentOptions) -> Iterator[int]:
    return (layer for layer in layers(config, options) if not config.has_indexer(layer))


RULES: tuple[Rule, ...] = (
    *DEEPSEEK_RULES,
    *(Rule(_with_indexer, (output,)) for output in _INDEXER),
    *(Rule(_perhaps_with_indexer, (output,), optional=True) for output in _INDEXER),
)


def _n_mtp(config: IndexedConfig, options: LatentOptions) -> int | None:
    """Return the number of MTP layers where config.json states one, unless they are left out."""
    return len(mtp_layers(config, options)) if config.states_mtp and options.mtp is not False else None


METADATA: tuple[Key, ...] = (
    *(key for key in DEEPSEEK_METADATA if key.name != keys.NEXTN_PREDICT_LAYERS),
    Key(keys.NEXTN_PREDICT_LAYERS, Value.u32, _n_mtp),
    Key(keys.INDEXER_HEAD_COUNT, Value.u32, lambda c, o: c.index_n_heads),
    Key(keys.INDEXER_KEY_LENGTH, Value.u32, lambda c, o: c.index_head_dim),
    Key(keys.INDEXER_TOP_K, Value.u32, lambda c, o: c.index_topk),
    Key(keys.INDEXER_TYPES, Value.bools, lambda c, o: c.indexer_types),
)


def _types(shapes: Mapping[str, tuple[int, ...]], n_layers: int) -> tuple[bool, ...] | None:
    """Return which layers have an indexer, for a file whose keys don't say it; None where all have one."""
    types = tuple(f"blk.{layer}.indexer.attn_k.weight" in shapes for layer in range(n_layers))
    return None if all(types) else types


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> IndexedConfig:
    """Return the configuration in a GGUF file: the inverse of METADATA; see `read_deepseek_file`."""
    base = read_deepseek_file(family, metadata, shapes, path)
    hparams = read_hparams(metadata, family.gguf_name, path)
    values = dict(vars(base))
    return IndexedConfig(
        **values | {"architecture": family.hf_names[0]},
        index_n_heads=hparams.size("indexer_head_count"),
        index_head_dim=hparams.size("indexer_key_length"),
        index_topk=hparams.size("indexer_top_k"),
        indexer_types=hparams.flags("indexer_types", base.num_hidden_layers)
        or _types(shapes, base.num_hidden_layers),
    )


def indexed(name: str, gguf_name: str, defaults: Defaults, **differences: Any) -> Architecture:
    """Return a family of DeepSeek's with an indexer; `differences` are other fields of Architecture."""
    return relative(
        name,
        gguf_name=gguf_name,
        defaults=defaults,
        read=IndexedConfig.from_dict,
        keeps_mtp=True,
        rules=RULES,
        metadata=METADATA,
        reader=_read_file,
        **{"notes": common_notes, **differences},
    )


DEEPSEEK_V32 = indexed(V32, "deepseek32", Defaults(), quirks=Quirks(adds_bos=True))
