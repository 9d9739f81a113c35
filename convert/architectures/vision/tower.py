"""Base of vision towers, which are families of the architecture `clip`, and leave the text out.

A tower is an `Architecture` like a text model. Its rules have the names of the checkpoint without what says
where in the whole model the tower stands. Keys are in the order of llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.base import Architecture, Key
from convert.architectures.decoder.rules import one
from convert.architectures.rules import Drop, Mapped, OutputTensor, Renamed, Rule, Where
from convert.architectures.vision.config import TowerConfig
from convert.weights.base import Weight
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F16, F32, GGMLType
from gguf_tools.format.values import Value
from quantize.fill.sources import float_type

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
    text = Drop(lambda name: not name.startswith(prefixes), "text part; the file holds only the tower")
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


VISION: tuple[Key, ...] = (
    Key(keys.CLIP_HAS_VISION_ENCODER, Value.bool_, lambda c, o: True),
    Key(keys.CLIP_VISION_PROJECTION_DIM, Value.u32, lambda c, o: c.projection_dim),
    Key(keys.CLIP_VISION_IMAGE_SIZE, Value.u32, lambda c, o: c.image_size),
    Key(keys.CLIP_VISION_PATCH_SIZE, Value.u32, lambda c, o: c.patch_size),
    Key(keys.CLIP_VISION_EMBEDDING_LENGTH, Value.u32, lambda c, o: c.hidden_size),
    Key(keys.CLIP_VISION_FEED_FORWARD_LENGTH, Value.u32, lambda c, o: c.intermediate_size),
    Key(keys.CLIP_VISION_BLOCK_COUNT, Value.u32, lambda c, o: c.num_hidden_layers),
    Key(keys.CLIP_VISION_HEAD_COUNT, Value.u32, lambda c, o: c.num_attention_heads),
    Key(keys.CLIP_VISION_IMAGE_MEAN, Value.f32s, lambda c, o: c.image_mean),
    Key(keys.CLIP_VISION_IMAGE_STD, Value.f32s, lambda c, o: c.image_std),
)

LAYER_NORM_EPS = Key(keys.CLIP_VISION_LAYERNORM_EPS, Value.f32, lambda c, o: c.layer_norm_eps)
USE_GELU = Key(keys.CLIP_USE_GELU, Value.bool_, lambda c, o: True)


def projector(name: str, key: str = keys.CLIP_PROJECTOR_TYPE) -> Key:
    """Return the key that says how the tower's output becomes hidden states of the text model."""
    return Key(key, Value.string, lambda c, o: name)


def _of_audio(name: str, kind: Callable[[Any], Value], value: Callable[[Any], Any]) -> Key:
    """Return a key that a file without an audio tower lacks."""
    return Key(name, kind, lambda c, o: value(c.audio) if c.audio else None)


AUDIO: tuple[Key, ...] = (
    _of_audio(keys.CLIP_HAS_AUDIO_ENCODER, Value.bool_, lambda audio: True),
    _of_audio(keys.CLIP_AUDIO_PROJECTION_DIM, Value.u32, lambda audio: audio.projection_dim),
    _of_audio(keys.CLIP_AUDIO_EMBEDDING_LENGTH, Value.u32, lambda audio: audio.hidden_size),
    _of_audio(keys.CLIP_AUDIO_FEED_FORWARD_LENGTH, Value.u32, lambda audio: audio.intermediate_size),
    _of_audio(keys.CLIP_AUDIO_BLOCK_COUNT, Value.u32, lambda audio: audio.num_hidden_layers),
    _of_audio(keys.CLIP_AUDIO_HEAD_COUNT, Value.u32, lambda audio: audio.num_attention_heads),
)


def audio_projector(name: str) -> tuple[Key, ...]:
    """Return the last keys about the audio tower: what projects its output, and what it takes."""
    return (
        _of_audio(keys.CLIP_AUDIO_PROJECTOR_TYPE, Value.string, lambda audio: name),
        _of_audio(keys.CLIP_AUDIO_NUM_MEL_BINS, Value.u32, lambda audio: audio.n_mels),
        _of_audio(keys.CLIP_AUDIO_LAYERNORM_EPS, Value.f32, lambda audio: audio.layer_norm_eps),
    )


def layers(config: Any, options: Any) -> range:
    return range(config.num_hidden_layers)


def with_bias(where: Where, name: str, source: str, rows: str, cols: str = "") -> tuple[Rule, ...]:
    """Return the rules of a weight, and of the bias that is as long as the weight has rows."""
    return (
        one(where, f"{name}.weight", f"{source}.weight", f"{rows} {cols}"),
        one(where, f"{name}.bias", f"{source}.bias", rows),
    )


_SIDES = ("input_min", "input_max", "output_min", "output_max")


def clipped(where: Where, name: str, source: str, sizes: str) -> Iterator[Rule]:
    """Yield the rules of a matrix, and of the bounds that a checkpoint may have beside it."""
    yield one(where, f"{name}.weight", f"{source}.weight", sizes)
    for side in _SIDES:
        yield replace(one(where, f"{name}.{side}", f"{source}.{side}", "", _bound), optional=True)


@dataclass(frozen=True, eq=False)
class PatchKernels(Renamed):
    """A matrix that multiplies patches, as kernels of a convolution: (rows, channels, patch, patch).

    A row of the matrix has a patch pixel by pixel, with the channels of a pixel side by side. A kernel has it
    channel by channel, so each row of the matrix becomes channels * patch rows here.
    """

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        _, channels, height, width = self.shape
        per_kernel = channels * height
        first, last = start // per_kernel, -(-stop // per_kernel)
        pixels = self.weight.read_rows(first, last).reshape(-1, height, width, channels)
        rows = pixels.transpose(0, 3, 1, 2).reshape(-1, width)
        return np.ascontiguousarray(rows[start - first * per_kernel : stop - first * per_kernel])


def patch_kernels(name: str, weights: Sequence[Weight], config: Any) -> OutputTensor:
    """Return the kernels of a matrix that multiplies patches."""
    (weight,) = weights
    patch = config.patch_size
    return PatchKernels(name, (weight.shape[0], config.channels, patch, patch), float_type(weight), weight)


_LARGEST = np.finfo(np.float32).max


def _bound(name: str, weights: Sequence[Weight], config: Any) -> OutputTensor:
    """Return a bound, which a checkpoint stores without a dimension, as a vector of one finite number."""
    (weight,) = weights
    # Infinities clip nothing, and the largest numbers don't either.
    return Mapped(name, (1,), F32, weight, lambda numbers: np.clip(numbers, -_LARGEST, _LARGEST))
