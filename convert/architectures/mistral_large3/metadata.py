"""The keys deepseek2.* of Mistral Large 3, in the order of llama.cpp's converter: YaRN after all others.

`read_metadata` is the inverse. It reads any file of this name, and tells Mistral's by their temperature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from convert.architectures.base import Key
from convert.architectures.deepseek2.config import DeepseekConfig
from convert.architectures.deepseek2.metadata import GGUF_NAME
from convert.architectures.deepseek2.metadata import METADATA as DEEPSEEK_METADATA
from convert.architectures.deepseek2.metadata import read_metadata as read_deepseek
from convert.architectures.mistral_large3.config import MistralConfig
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value

_YARN = (
    keys.ROPE_SCALING_TYPE,
    keys.ROPE_SCALING_FACTOR,
    keys.ROPE_SCALING_YARN_BETA_FAST,
    keys.ROPE_SCALING_YARN_BETA_SLOW,
    keys.ROPE_SCALING_YARN_LOG_MUL,
    keys.ROPE_SCALING_ORIG_CTX_LEN,
)

METADATA: tuple[Key, ...] = (
    *(key for key in DEEPSEEK_METADATA if key.name not in _YARN),
    *(next(key for key in DEEPSEEK_METADATA if key.name == name) for name in _YARN),
    Key(keys.TEMPERATURE_SCALE, Value.f32, lambda c, o: c.temperature_scale),
    Key(keys.TEMPERATURE_LENGTH, Value.u32, lambda c, o: c.temperature_length),
)


def read_metadata(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DeepseekConfig:
    """Return what the keys and tensors of a GGUF file say about the model.

    shapes  tensor name -> shape, rows first
    path    the file, for messages
    raises  FormatError, MissingTensor, UnsupportedCheckpoint, BadRequest, naming the file and the key
    """
    base = read_deepseek(metadata, shapes, path)
    hparams = read_hparams(metadata, GGUF_NAME, path)
    # llama.cpp takes 0 for "none" too.
    if not hparams.temperature_scale:
        return base
    return MistralConfig(
        **{field.name: getattr(base, field.name) for field in fields(DeepseekConfig)},
        temperature_scale=hparams.temperature_scale,
        temperature_length=hparams.size("temperature_length"),
    )
