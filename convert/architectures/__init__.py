"""Model families that can be converted, by the name that config.json gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gguf_tools.errors import BadConfig, UnsupportedCheckpoint

if TYPE_CHECKING:
    from convert.architectures.base import Architecture

ARCHITECTURES: Mapping[str, str] = MappingProxyType({
    "DeepseekV2ForCausalLM": "convert.architectures.deepseek2",
    "DeepseekV3ForCausalLM": "convert.architectures.deepseek2",
    "DeepseekForCausalLM": "convert.architectures.deepseek",
    "YoutuForCausalLM": "convert.architectures.deepseek2",
    "DeepseekV4ForCausalLM": "convert.architectures.deepseek4",
    "MistralLarge3ForCausalLM": "convert.architectures.mistral_large3",
    "DeepseekV32ForCausalLM": "convert.architectures.deepseek32",
    "GlmMoeDsaForCausalLM": "convert.architectures.glm_moe_dsa",
    "Glm4MoeLiteForCausalLM": "convert.architectures.glm4_moe_lite",
    "KimiVLForConditionalGeneration": "convert.architectures.kimi",
    "KimiK25ForConditionalGeneration": "convert.architectures.kimi",
    "LlamaForCausalLM": "convert.architectures.llama",
    "MistralForCausalLM": "convert.architectures.llama",
    "MixtralForCausalLM": "convert.architectures.llama",
    "Qwen2ForCausalLM": "convert.architectures.qwen2",
    "Qwen3ForCausalLM": "convert.architectures.qwen3",
    "Qwen3MoeForCausalLM": "convert.architectures.qwen3moe",
    "GptOssForCausalLM": "convert.architectures.gpt_oss",
    "Glm4MoeForCausalLM": "convert.architectures.glm4moe",
    "MiniMaxM2ForCausalLM": "convert.architectures.minimax_m2",
})  # fmt: skip
"""Name in `architectures` of config.json -> the family's package.

Its module `family` has the ARCHITECTURE; its module `options`, quick to import, has the dataclass Options.
"""


def supported() -> tuple[str, ...]:
    """Return the names that can be converted."""
    return tuple(ARCHITECTURES)


def find_architecture(
    config: Mapping[str, Any], path: str | Path = "config.json", names: Iterable[str] | None = None
) -> Architecture:
    """Return the family of the model that `config`, the content of `path`, describes.

    names   of the stored tensors, where they are known: they tell which family an unknown one is like
    raises  BadConfig when it names none, UnsupportedCheckpoint when it is another one
    """
    listed = config.get("architectures")
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], str):
        found = "no architectures" if listed is None else f"architectures is {str(listed)[:80]!r}"
        raise BadConfig(f"{path}: {found}, expected a list such as ['{supported()[-1]}']")
    name = listed[0]
    if name not in ARCHITECTURES:
        from convert.architectures.nearest import nearest

        raise UnsupportedCheckpoint(
            f"{path}: architecture {name}, expected one of {', '.join(supported())};"
            f" {nearest(name, ARCHITECTURES.values(), names)}"
        )
    architecture: Architecture = import_module(f"{ARCHITECTURES[name]}.family").ARCHITECTURE
    return architecture


def declared_options() -> tuple[type[Any], ...]:
    """Return the dataclass of options of every family, those that several share once."""
    packages = dict.fromkeys(ARCHITECTURES.values())
    return tuple(dict.fromkeys(import_module(f"{package}.options").Options for package in packages))
