"""Reads what a checkpoint says about its own quantization, wherever its producer wrote it.

The first of these that exists counts:

    config.json             quantization_config, or compression_config (older compressed-tensors); the same
                            inside text_config (multimodal wrappers)
                            quantization, MLX's
    quantize_config.json    the whole file (AutoGPTQ)
    quant_config.json       the whole file (AutoAWQ; EETQ)
    hf_quant_config.json    `quantization` in it (ModelOpt); also completes what config.json says

The method is `quant_method`, or `method`. A file that never has such a key stands for the method of the
program that writes it. Names of methods are in lower case, and one method has one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from convert.checkpoint.checkpoint import Checkpoint
from gguf_tools.errors import BadConfig
from gguf_tools.text import quoted

_SECTIONS = ("quantization_config", "compression_config")
_OF_MLX = "quantization"
"""Key of MLX, which writes the same under quantization_config, without a method."""

_SPELLINGS = {
    "intel/auto-round": "auto-round", "auto_round": "auto-round", "autoround": "auto-round",
    "compressed_tensors": "compressed-tensors", "bnb": "bitsandbytes", "fbgemm-fp8": "fbgemm_fp8",
}  # fmt: skip
_METHOD_KEYS = ("quant_method", "method")
# A key that only one program writes, for sections without a method.
_TELLING_KEYS = {
    "quant_algo": "modelopt", "config_groups": "compressed-tensors", "w_bit": "awq", "mode": "mlx",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """A checkpoint's quantization settings; empty where it has none.

    method   "gptq", "fp8" ...; None when nothing says so
    values   the keys as they stand there
    path     the file they stand in
    section  the key in that file that holds them, "" for the file itself
    model    config.json
    """

    method: str | None
    values: Mapping[str, Any]
    path: Path
    section: str
    model: Mapping[str, Any]

    def get(self, *keys: str) -> Any:
        """Return the value of the first of `keys` (spellings of one setting) that is there and not null."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def where(self, key: str) -> str:
        """Return where `key` stands, for an error: "DIR/config.json: quantization_config.bits"."""
        return f"{self.path}: {self.section}.{key}" if self.section else f"{self.path}: {key}"

    def bad(self, key: str, expected: str) -> BadConfig:
        """Return the error for a value of `key` that makes no sense."""
        return BadConfig(f"{self.where(key)} is {quoted(self.values.get(key))}, expected {expected}")

    def integer(self, *keys: str) -> int | None:
        """Return an integer setting under the first of its spellings; BadConfig when it is something else."""
        key = next((key for key in keys if self.values.get(key) is not None), None)
        if key is None:
            return None
        value = self.values[key]
        if type(value) is not int:
            raise self.bad(key, "an integer")
        return value

    def of_groups(self, key: str) -> tuple[Any, ...]:
        """Return the values of `key` for weights in all `config_groups` (compressed-tensors), each once."""
        groups = self.values.get("config_groups")
        values: list[Any] = []
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            value = weights.get(key) if isinstance(weights, dict) else None
            if value is not None and value not in values:
                values.append(value)
        return tuple(values)

    @property
    def described(self) -> str:
        """Name that the checkpoint gives to its format, for messages."""
        if self.method is None:
            return "no quantization_config"
        key = next((key for key in _METHOD_KEYS if key in self.values), None)
        place = self.where(key) if key else str(self.path)
        return f"{place} is {quoted(self.method)}"


def read_settings(checkpoint: Checkpoint) -> Settings:
    """Read the settings of a checkpoint's quantization.

    raises  BadConfig when a place for it holds something else
    """
    config, path = checkpoint.config, checkpoint.config_path
    modelopt = checkpoint.read_json("hf_quant_config.json")
    own = config.get(_OF_MLX)
    if isinstance(own, Mapping) and own.keys() >= {"bits", "group_size"}:
        return _settings(dict(own), path, _OF_MLX, config, "mlx")
    for holder, prefix in ((config, ""), (config.get("text_config"), "text_config.")):
        for key in _SECTIONS:
            if isinstance(holder, Mapping) and holder.get(key) is not None:
                values = _section(holder[key], path, prefix + key)
                if modelopt is not None:
                    values = _modelopt_values(modelopt, checkpoint) | values
                fallback = "compressed-tensors" if key == "compression_config" else None
                return _settings(values, path, prefix + key, config, fallback)
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        content = checkpoint.read_json(name)
        if content is not None:
            return _settings(content, checkpoint.folder / name, "", config, method)
    if modelopt is not None:
        values = _modelopt_values(modelopt, checkpoint)
        path = checkpoint.folder / "hf_quant_config.json"
        return _settings(values, path, "quantization", config, "modelopt")
    return Settings(None, MappingProxyType({}), path, "quantization_config", config)


def _modelopt_values(content: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    path = checkpoint.folder / "hf_quant_config.json"
    return _section(content.get("quantization", {}), path, "quantization")


def _section(value: Any, path: Path, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadConfig(f"{path}: {key} is {quoted(value)}, expected an object")
    return value


def _settings(
    values: dict[str, Any], path: Path, section: str, model: Mapping[str, Any], fallback: str | None
) -> Settings:
    settings = Settings(None, MappingProxyType(values), path, section, model)
    key = next((key for key in _METHOD_KEYS if key in values), None)
    if key is None:
        method = next((_TELLING_KEYS[key] for key in _TELLING_KEYS if key in values), fallback)
    elif isinstance(values[key], str):
        method = values[key].lower()
        method = _SPELLINGS.get(method, method)
    else:
        raise settings.bad(key, "the name of a method")
    return Settings(method, settings.values, path, section, model)
