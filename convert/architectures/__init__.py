"""Model families that can be converted, by the name that config.json gives them.

A family is an `Architecture` in FAMILIES of one of MODULES. Its names, in config.json and in GGUF files, are
told there alone: who asks for one gets the first family that has it, and no module behind that is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.architectures.config_reader import architecture_name, class_names, with_known_class
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.lazy import late
from gguf_tools.text import cut_short

if TYPE_CHECKING:
    from convert.architectures.base import Architecture

MODULES: tuple[str, ...] = (
    "convert.architectures.deepseek2.family",
    "convert.architectures.dense",
    "convert.architectures.mixtures",
    "convert.architectures.deepseek2.relatives",
    "convert.architectures.deepseek2.mistral_large3",
    "convert.architectures.deepseek4",
    "convert.architectures.delta_net.family",
    "convert.architectures.delta_net.qwen4exp",
    "convert.architectures.qwen_vl",
    "convert.architectures.gemma.gemma2",
    "convert.architectures.gemma.gemma3",
    "convert.architectures.gemma.gemma3n",
    "convert.architectures.gemma.gemma4",
    "convert.architectures.phi3",
    "convert.architectures.apertus",
    "convert.architectures.recurrent.granite",
    "convert.architectures.recurrent.nemotron_h",
    "convert.architectures.gpt_oss",
    "convert.architectures.encoders.bert",
    "convert.architectures.encoders.modern_bert",
    "convert.architectures.encoders.nomic_bert",
    "convert.architectures.hunyuan",
    "convert.architectures.ernie4_5",
    "convert.architectures.windowed.cohere",
    "convert.architectures.recurrent.lfm2",
    "convert.architectures.windowed.exaone_moe",
    "convert.architectures.windowed.laguna",
    "convert.architectures.windowed.mimo",
    "convert.architectures.windowed.step35",
    "convert.architectures.kimi.linear",
    "convert.architectures.kimi.k3",
    "convert.architectures.kimi.ling3",
    "convert.architectures.kimi.glm5_next",
    "convert.architectures.recurrent.falcon_h1",
    "convert.architectures.minimax_m3",
    "convert.architectures.llama4",
    "convert.architectures.gemma.muse_glimmer",
)
"""Modules with FAMILIES, in the order of asking. One with several for a name in config.json has `choose`."""


def families() -> Iterator[Architecture]:
    """Yield all families."""
    for module in MODULES:
        yield from late(module).FAMILIES


def supported() -> tuple[str, ...]:
    """Return the names that can be converted."""
    return tuple(dict.fromkeys(name for family in families() for name in family.hf_names))


def find_architecture(
    config: Mapping[str, Any], path: str | Path = "config.json", names: Iterable[str] | None = None
) -> Architecture:
    """Return the family of the model that `config`, the content of `path`, describes.

    names   of the stored tensors, where they are known: they tell which family an unknown one is like
    raises  BadConfig when it names none, UnsupportedCheckpoint when it is another one
    """
    name = architecture_name(config, path, "MiniMaxM2ForCausalLM")
    for known in class_names(name):
        for module in map(late, MODULES):
            found: Architecture | None = next((one for one in module.FAMILIES if known in one.hf_names), None)
            if found is not None:
                if hasattr(module, "choose"):
                    # A class of transformers may be several architectures of llama.cpp.
                    found = module.choose(with_known_class(config, found.hf_names))
                return found
    from convert.architectures.nearest import nearest

    raise UnsupportedCheckpoint(
        f"{path}: architecture {cut_short(name)}, expected one of {', '.join(supported())};"
        f" {nearest(name, families(), names)}"
    )


def find_by_gguf_name(name: str) -> Architecture | None:
    """Return the family whose files have a `name` in general.architecture; None for an unknown one."""
    return next((family for family in families() if family.gguf_name == name), None)
