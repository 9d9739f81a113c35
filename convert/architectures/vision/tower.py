"""Base of vision towers, which are families of the architecture `clip`, and leave the text out.

A tower is an `Architecture` like a text model. Its rules have the names of the checkpoint without what says
where in the whole model the tower stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.rules import Drop, OutputTensor, Rule
from convert.architectures.vision.config import TowerConfig
from gguf_tools.format.ggml_types import F16, F32, GGMLType

CLIP = "clip"
"""`general.architecture` of a file with towers, whatever the model."""


@dataclass(frozen=True)
class Tower(Architecture):
    """A vision tower, and with it the audio tower where the model has one.

    prefixes  beginnings of the canonical names of its weights
    """

    prefixes: tuple[str, ...] = ()
    tells_unread: bool = False  # most of config.json is about the text part

    def is_there(self, names: Iterable[str]) -> bool:
        """Return whether a checkpoint with these weights has the tower."""
        canonical = self.stored_names
        return any(canonical(name).startswith(self.prefixes) for name in names)


def tower(
    *hf_names: str,
    prefixes: tuple[str, ...],
    read_config: Callable[[Mapping[str, Any], Path], TowerConfig],
    rules: tuple[Rule, ...],
    metadata: tuple[Key, ...],
    canonical_name: Callable[[str], str],
    forced_type: Callable[[OutputTensor, GGMLType], GGMLType | None] | None = None,
    left_out: tuple[Drop, ...] = (),
) -> Tower:
    """Return a tower; what has none of the `prefixes` is the text part.

    left_out  weights with a prefix that the file does without
    """
    text = Drop(lambda name: not name.startswith(prefixes), "text part; the file holds the tower alone")
    return Tower(
        hf_names,
        CLIP,
        read_config,
        rules,
        metadata,
        drops=lambda config, options: (text, *left_out),
        canonical_name=canonical_name,
        forced_type=forced_type or usual_type,
        prefixes=prefixes,
    )


def usual_type(tensor: OutputTensor, wanted: GGMLType) -> GGMLType | None:
    """Return the type of what no tower has in other types: F32 for positions, and for kernels of patches,
    which are F16 in a file of F16."""
    if ".position_embd." in tensor.name:
        return F32
    if ".patch_embd.weight" in tensor.name:
        return F16 if wanted == F16 else F32
    return None
