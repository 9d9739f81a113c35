"""Vision towers that can be converted, by the name that config.json gives their models.

The file that a tower becomes is an "mmproj": `general.architecture` is `clip`, and it stands beside the file
of the text part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from convert.architectures.config_reader import architecture_name, with_head
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata, Value
from gguf_tools.lazy import late
from gguf_tools.text import cut_short

if TYPE_CHECKING:
    from convert.architectures.vision.tower import Tower

TOWERS: Mapping[str, str] = MappingProxyType({
    "Qwen3VLForConditionalGeneration": "qwen3vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3vl",
    "Qwen3_5ForConditionalGeneration": "qwen3vl",
    "Qwen3_5MoeForConditionalGeneration": "qwen3vl",
    "Qwen4ExpForConditionalGeneration": "qwen3vl",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
})  # fmt: skip
"""Name in `architectures` of config.json -> the module of this package that has its tower."""


def holds_tower(metadata: Metadata) -> bool:
    """Return whether a file with these keys holds a tower, not a text model."""
    return metadata.get(keys.TYPE) == Value.string("mmproj")


def find_tower(config: Mapping[str, Any], path: str | Path, names: Iterable[str]) -> Tower:
    """Find the tower of the model that `config`, the content of `path`, describes.

    names   of the stored tensors
    raises  BadConfig when it names no model, UnsupportedCheckpoint when no tower is known of it, or the
            checkpoint has none
    """
    name = architecture_name(config, path, next(iter(TOWERS)))
    known = with_head(name, TOWERS)
    if known is None:
        raise UnsupportedCheckpoint(
            f"{path}: no vision tower is known of architecture {cut_short(name)}, only of {', '.join(TOWERS)}"
        )
    module = late(f"convert.architectures.vision.{TOWERS[known]}")
    tower: Tower = module.ARCHITECTURE
    if not tower.is_there(names):
        raise UnsupportedCheckpoint(
            f"{path}: the checkpoint has no vision tower, no weight {' or '.join(tower.prefixes)}..., but its"
            f" text part can be converted without --mmproj"
        )
    return tower
