"""The keys deepseek2.* of Mistral Large 3, in the order of llama.cpp's converter: YaRN after all others."""

from __future__ import annotations

from convert.architectures.base import Key
from convert.architectures.deepseek2.metadata import METADATA as DEEPSEEK_METADATA
from gguf_tools import keys
from gguf_tools.values import Value

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
