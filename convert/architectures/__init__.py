"""Model families that can be converted, by the name that config.json gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from convert.architectures.config_reader import architecture_name, with_head, with_known_class
from convert.architectures.options import LatentOptions, MTPOptions, NoOptions
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.lazy import late
from gguf_tools.text import cut_short

if TYPE_CHECKING:
    from convert.architectures.base import Architecture


@dataclass(frozen=True)
class FamilyRow:
    """A row of the table of families.

    module   has the family's ARCHITECTURE
    options  its `options`, which --help needs without the module
    """

    module: str
    options: type[Any] = NoOptions


def _decoder(name: str) -> FamilyRow:
    return FamilyRow(f"convert.architectures.{name}")


def _dense(name: str) -> FamilyRow:
    return FamilyRow(f"convert.architectures.dense.{name}")


def _latent(name: str) -> FamilyRow:
    return FamilyRow(f"convert.architectures.deepseek2.{name}", LatentOptions)


def _delta_net(name: str) -> FamilyRow:
    return FamilyRow(f"convert.architectures.delta_net.{name}", MTPOptions)


ARCHITECTURES: Mapping[str, FamilyRow] = MappingProxyType({
    "DeepseekV2ForCausalLM": _latent("family"),
    "DeepseekV3ForCausalLM": _latent("family"),
    "DeepseekForCausalLM": _decoder("deepseek"),
    "YoutuForCausalLM": _latent("youtu"),
    "DeepseekV4ForCausalLM": _decoder("deepseek4"),
    "MistralLarge3ForCausalLM": _latent("mistral_large3"),
    "DeepseekV32ForCausalLM": _latent("deepseek32"),
    "GlmMoeDsaForCausalLM": _latent("glm_moe_dsa"),
    "Glm4MoeLiteForCausalLM": _latent("glm4_moe_lite"),
    "KimiVLForConditionalGeneration": _latent("kimi"),
    "KimiK25ForConditionalGeneration": _latent("kimi"),
    "LlamaForCausalLM": _decoder("llama"),
    "MistralForCausalLM": _decoder("llama"),
    "MixtralForCausalLM": _decoder("llama"),
    "SmolLM3ForCausalLM": _dense("smollm3"),
    "Qwen2ForCausalLM": _dense("qwen2"),
    "Qwen3ForCausalLM": _dense("qwen3"),
    "Qwen3MoeForCausalLM": _decoder("qwen3moe"),
    "Qwen3NextForCausalLM": _delta_net("qwen3_next"),
    "Qwen3_5ForConditionalGeneration": _delta_net("qwen35"),
    "Qwen3_5ForCausalLM": _delta_net("qwen35"),
    "Qwen3_5MoeForConditionalGeneration": _delta_net("qwen35_moe"),
    "Qwen3_5MoeForCausalLM": _delta_net("qwen35_moe"),
    "Gemma3ForCausalLM": _decoder("gemma.gemma3"),
    "Gemma3ForConditionalGeneration": _decoder("gemma.gemma3"),
    "Gemma4ForCausalLM": _decoder("gemma.gemma4"),
    "Gemma4ForConditionalGeneration": _decoder("gemma.gemma4"),
    "Gemma4UnifiedForConditionalGeneration": _decoder("gemma.gemma4"),
    "SeedOssForCausalLM": _dense("seed_oss"),
    "Olmo2ForCausalLM": _dense("olmo2"),
    "Olmo3ForCausalLM": _dense("olmo2"),
    "Ministral3ForCausalLM": _dense("ministral3"),
    "Mistral3ForConditionalGeneration": _dense("ministral3"),
    "Phi3ForCausalLM": _dense("phi3"),
    "GraniteForCausalLM": _decoder("granite"),
    "GraniteMoeForCausalLM": _decoder("granite"),
    "GraniteMoeSharedForCausalLM": _decoder("granite"),
    "GraniteMoeHybridForCausalLM": _decoder("granite"),
    "NemotronHForCausalLM": FamilyRow("convert.architectures.nemotron_h", MTPOptions),
    "GptOssForCausalLM": _decoder("gpt_oss"),
    "Glm4MoeForCausalLM": FamilyRow("convert.architectures.glm4moe", MTPOptions),
    "MiniMaxM2ForCausalLM": _decoder("minimax_m2"),
})  # fmt: skip
"""Name in `architectures` of config.json -> the family."""


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
    name = architecture_name(config, path, supported()[-1])
    known = with_head(name, ARCHITECTURES)
    if known is None:
        from convert.architectures.nearest import nearest

        raise UnsupportedCheckpoint(
            f"{path}: architecture {cut_short(name)}, expected one of {', '.join(supported())};"
            f" {nearest(name, (row.module for row in ARCHITECTURES.values()), names)}"
        )
    module = late(ARCHITECTURES[known].module)
    config = with_known_class(config, ARCHITECTURES)
    # A class of transformers may be several architectures of llama.cpp.
    architecture: Architecture = module.choose(config) if hasattr(module, "choose") else module.ARCHITECTURE
    return architecture


def declared_options() -> tuple[type[Any], ...]:
    """Return the dataclass of options of every family, those that several share once."""
    return tuple(dict.fromkeys(row.options for row in ARCHITECTURES.values()))
