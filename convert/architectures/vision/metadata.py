"""The keys that vision and audio towers have, in the order of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from convert.architectures.base import Key
from gguf_tools.format import keys
from gguf_tools.format.values import Value

_u32 = Value.u32

VISION: tuple[Key, ...] = (
    Key(keys.CLIP_HAS_VISION_ENCODER, Value.bool_, lambda c, o: True),
    Key(keys.CLIP_VISION_PROJECTION_DIM, _u32, lambda c, o: c.projection_dim),
    Key(keys.CLIP_VISION_IMAGE_SIZE, _u32, lambda c, o: c.image_size),
    Key(keys.CLIP_VISION_PATCH_SIZE, _u32, lambda c, o: c.patch_size),
    Key(keys.CLIP_VISION_EMBEDDING_LENGTH, _u32, lambda c, o: c.hidden_size),
    Key(keys.CLIP_VISION_FEED_FORWARD_LENGTH, _u32, lambda c, o: c.intermediate_size),
    Key(keys.CLIP_VISION_BLOCK_COUNT, _u32, lambda c, o: c.num_hidden_layers),
    Key(keys.CLIP_VISION_HEAD_COUNT, _u32, lambda c, o: c.num_attention_heads),
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
    _of_audio(keys.CLIP_AUDIO_PROJECTION_DIM, _u32, lambda audio: audio.projection_dim),
    _of_audio(keys.CLIP_AUDIO_EMBEDDING_LENGTH, _u32, lambda audio: audio.hidden_size),
    _of_audio(keys.CLIP_AUDIO_FEED_FORWARD_LENGTH, _u32, lambda audio: audio.intermediate_size),
    _of_audio(keys.CLIP_AUDIO_BLOCK_COUNT, _u32, lambda audio: audio.num_hidden_layers),
    _of_audio(keys.CLIP_AUDIO_HEAD_COUNT, _u32, lambda audio: audio.num_attention_heads),
)


def audio_projector(name: str) -> tuple[Key, ...]:
    """Return the last keys about the audio tower: what projects its output, and what it takes."""
    return (
        _of_audio(keys.CLIP_AUDIO_PROJECTOR_TYPE, Value.string, lambda audio: name),
        _of_audio(keys.CLIP_AUDIO_NUM_MEL_BINS, _u32, lambda audio: audio.n_mels),
        _of_audio(keys.CLIP_AUDIO_LAYERNORM_EPS, Value.f32, lambda audio: audio.layer_norm_eps),
    )
