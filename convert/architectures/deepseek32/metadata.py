"""The keys deepseek32.* and glm-dsa.*: DeepSeek's, and those of the indexer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

from convert.architectures.base import Key
from convert.architectures.deepseek2.config import DeepseekConfig
from convert.architectures.deepseek2.metadata import METADATA as DEEPSEEK_METADATA
from convert.architectures.deepseek2.metadata import read_metadata as read_deepseek
from convert.architectures.deepseek2.options import Options
from convert.architectures.deepseek2.places import mtp_layers
from convert.architectures.deepseek32.config import IndexedConfig
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value


def _n_mtp(config: IndexedConfig, options: Options) -> int | None:
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


def metadata_reader(
    gguf_name: str, architecture: str
) -> Callable[[Metadata, Mapping[str, tuple[int, ...]], Path], IndexedConfig]:
    """Return what reads the configuration out of a GGUF file: the inverse of METADATA.

    gguf_name     the family's name in general.architecture
    architecture  its name in config.json
    """

    def read(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path) -> IndexedConfig:
        base = read_deepseek(metadata, shapes, path, gguf_name=gguf_name)
        hparams = read_hparams(metadata, gguf_name, path)
        values = {field.name: getattr(base, field.name) for field in fields(DeepseekConfig)}
        return IndexedConfig(
            **values | {"architecture": architecture},
            index_n_heads=hparams.size("indexer_head_count"),
            index_head_dim=hparams.size("indexer_key_length"),
            index_topk=hparams.size("indexer_top_k"),
            indexer_types=hparams.indexer_types or _types(shapes, base.num_hidden_layers),
        )

    return read
