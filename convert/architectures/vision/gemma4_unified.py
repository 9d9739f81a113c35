"""Projections in place of towers, of the Gemma 4 of 12B: patches and sound go through no layer.

A row of the checkpoint's matrix has a patch pixel by pixel. llama.cpp hands it a patch channel by channel, so
the columns change places, and the numbers of the norm before it with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.rules import once, one
from convert.architectures.delta_net.arrange import ColumnsMoved, RowsMoved
from convert.architectures.rules import OutputTensor
from convert.architectures.vision.config import AudioConfig, TowerConfig, audio_fields, part_of, tower_fields
from convert.architectures.vision.gemma4 import IMAGE_SIZE
from convert.architectures.vision.tower import (
    AUDIO,
    LAYER_NORM_EPS,
    VISION,
    audio_projector,
    projector,
    tower,
    with_bias,
)
from convert.weights.base import Weight
from gguf_tools.format import keys
from quantize.fill.sources import float_type

_VISION: Mapping[str, Any] = {
    "patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840, "mm_posemb_size": 1120,
}  # fmt: skip
_NO_LAYERS = {"intermediate_size": 0, "num_hidden_layers": 0, "num_attention_heads": 0}


@dataclass(frozen=True)
class UnifiedConfig(TowerConfig):
    """How the model projects images and sound.

    pixels     of a side of what is projected at a time, several patches
    positions  rows of the table of positions along an axis
    audio      the same of sound
    """

    pixels: int
    positions: int
    audio: AudioConfig

    @property
    def pixel_cols(self) -> int:
        """Numbers of what is projected at a time."""
        return self.channels * self.pixels**2

    @property
    def axes(self) -> int:
        return 2


def read_config(raw: Mapping[str, Any], path: str | Path) -> UnifiedConfig:
    """Read the configuration of both projections."""
    stated = part_of(raw, "vision_config", path, _VISION)
    audio = part_of(raw, "audio_config", path, {"audio_embed_dim": 640})
    read = _with(stated, hidden_size=stated.raw["mm_embed_dim"])
    patch, pooled = read.size("patch_size", most=2**12), read.size("pooling_kernel_size", most=64)
    fields = tower_fields({"hidden_size": 2304, **raw}, read, least=0)
    return UnifiedConfig(
        **fields,
        image_size=IMAGE_SIZE,
        pixels=read.size("model_patch_size", patch * pooled, most=2**12),
        positions=read.size("mm_posemb_size"),
        audio=AudioConfig(**audio_fields(
            _with(audio, hidden_size=audio.raw["audio_embed_dim"]), fields["projection_dim"], least=0
        ), intermediate_size=0),
    )  # fmt: skip


def _with(read: ConfigReader, **spelled: Any) -> ConfigReader:
    """Return the reader with keys as towers with layers have them; there is no layer."""
    return ConfigReader({**read.raw, **_NO_LAYERS, **spelled}, read.path, read.prefix)


def _by_channel(name: str, weights: Sequence[Weight], config: UnifiedConfig) -> OutputTensor:
    """Return a weight whose columns are pixels, with those of a channel side by side."""
    (weight,) = weights
    pixels = np.arange(config.pixel_cols).reshape(-1, config.channels)
    return ColumnsMoved(name, weight.shape, float_type(weight), weight, pixels.T.reshape(-1))


def _by_axis(name: str, weights: Sequence[Weight], config: UnifiedConfig) -> OutputTensor:
    """Return the table of positions as a table for each axis, (axes, positions, columns)."""
    (weight,) = weights
    n_positions, axes, n_cols = weight.shape
    order = np.arange(n_positions * axes).reshape(n_positions, axes).T.reshape(-1)
    return RowsMoved(name, (axes, n_positions, n_cols), weight.type, weight, order)


_FROM = "vision_embedder"

ARCHITECTURE = tower(
    "Gemma4UnifiedForConditionalGeneration",
    prefixes=("vision_embedder.", "embed_vision.", "embed_audio."),
    read_config=read_config,
    rules=(
        one(once, "v.patch_norm.1.weight", f"{_FROM}.patch_ln1.weight", "pixel_cols", _by_channel),
        one(once, "v.patch_norm.1.bias", f"{_FROM}.patch_ln1.bias", "pixel_cols", _by_channel),
        one(once, "v.patch_embd.weight", f"{_FROM}.patch_dense.weight", "hidden_size pixel_cols",
            _by_channel),
        one(once, "v.patch_embd.bias", f"{_FROM}.patch_dense.bias", "hidden_size"),
        *with_bias(once, "v.patch_norm.2", f"{_FROM}.patch_ln2", "hidden_size"),
        one(once, "v.position_embd.weight", f"{_FROM}.pos_embedding", "positions axes hidden_size",
            _by_axis),
        *with_bias(once, "v.patch_norm.3", f"{_FROM}.pos_norm", "hidden_size"),
        one(once, "mm.input_projection.weight", "embed_vision.embedding_projection.weight",
            "projection_dim hidden_size"),
        one(once, "mm.a.input_projection.weight", "embed_audio.embedding_projection.weight",
            "projection_dim audio.hidden_size"),
    ),
    metadata=(
        *VISION,
        *AUDIO,
        projector("gemma4uv", keys.CLIP_VISION_PROJECTOR_TYPE),
        LAYER_NORM_EPS,
        *audio_projector("gemma4ua"),
    ),
    canonical_name=lambda name: name.removeprefix("model."),
)  # fmt: skip
