"""Finds a rotation of a module's inputs that a checkpoint states, under any of its names.

Some programs multiply the weights of a module with an orthogonal matrix, often Hadamard's, and its inputs
with the inverse when the model runs. Read without that, the weights give nonsense. What they write about it
has had many names: hadamard_config, rotation_config and transform_config in auto-round and in
compressed-tensors, rotation in GPTQModel, rotate in ModelOpt, hadamard_group_size in FP-Quant, quarot and
spinquant elsewhere. So every key with one of these words counts, however deep it stands, unless it says
nothing, or that it is off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from convert.checkpoint.checkpoint import Checkpoint
from gguf_tools.errors import UnsupportedCheckpoint

_METHOD = r"hadamard|spin_?quant|quarot|flat_?quant|duquant|butterfly"
_KEY = re.compile(rf"{_METHOD}|incoheren|rotat|transform(?!er)|(^|_)(had|rot)(_|$)", re.IGNORECASE)
_MODEL_KEY = re.compile(rf"{_METHOD}|^(online_|use_|activation_)?rotation", re.IGNORECASE)
"""The same in config.json itself, where much else is rotated."""

_MODEL_TYPE = re.compile(_METHOD, re.IGNORECASE)
_VALUE = re.compile(rf"(random_|random-)?({_METHOD}|rotation)(_?transform|_?modifier)?", re.IGNORECASE)
_TENSOR = re.compile(
    rf"{_METHOD}|(^|[._])(had([._]|$)|had_[kK]\b|rotations?([._]|$)|rotation_matrix)"
    r"|[._](input|output|weight|online|activation)_transform",
    re.IGNORECASE,
)
_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json")
_SECTIONS = ("quantization_config", "compression_config", "quantization")
_OFF = ("enable", "enabled")


def refuse_rotations(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedCheckpoint for the first key or tensor that says that modules' inputs are rotated."""
    for place in _stated(checkpoint):
        raise UnsupportedCheckpoint(
            f"{place}: the model rotates the inputs of its modules (a Hadamard matrix, or another), which is"
            " not read; convert the model that was quantized, or an export without a rotation"
        )


def _stated(checkpoint: Checkpoint) -> Iterator[str]:
    config, path = checkpoint.config, checkpoint.config_path
    text = config.get("text_config")
    for prefix, holder in (("", config), ("text_config.", text if isinstance(text, Mapping) else {})):
        for key in _SECTIONS:
            yield from (f"{path}: {found}" for found in _keys(holder.get(key), f"{prefix}{key}"))
        for key, value in holder.items():
            if _MODEL_KEY.search(key) and _says_something(value):
                yield f"{path}: {prefix}{key}"
            if key == "model_type" and isinstance(value, str) and _MODEL_TYPE.search(value):
                yield f"{path}: {prefix}{key} is {value}"
    for name in _FILES:
        yield from (f"{checkpoint.folder / name}: {found}" for found in _keys(checkpoint.read_json(name), ""))
    for name in checkpoint.names():
        if _TENSOR.search(name):
            yield f"{checkpoint.raw(name).path}: {name}"


def _keys(value: Any, place: str) -> Iterator[str]:
    """Yield where in settings a rotation is stated."""
    if isinstance(value, str):
        if _VALUE.fullmatch(value):
            yield place
        return
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, inner in items:
        inside = f"{place}.{key}" if place else str(key)
        if isinstance(key, str) and _KEY.search(key):
            if _says_something(inner):
                yield inside
        else:
            yield from _keys(inner, inside)


def _says_something(value: Any) -> bool:
    """Return whether a value is more than nothing, false, zero or a holder of these alone."""
    if isinstance(value, Mapping):
        if any(value.get(key) is False for key in _OFF):
            return False
        return any(map(_says_something, value.values()))
    if isinstance(value, list):
        return any(map(_says_something, value))
    if isinstance(value, str):
        return value.lower() not in ("", "none", "null", "false", "no", "off", "identity", "default")
    return bool(value)
