"""The family of Kimi's multimodal models: DeepSeek's under names that begin with `language_model.`."""

from __future__ import annotations

from dataclasses import replace

from convert.architectures.deepseek2.config import KIMI_K25, KIMI_VL, DeepseekConfig
from convert.architectures.deepseek2.family import ARCHITECTURE as DEEPSEEK2
from convert.architectures.deepseek2.rules import drops
from convert.architectures.options import LatentOptions
from convert.architectures.rules import Drop

VISION_PARTS = ("vision_tower.", "multi_modal_projector.", "mm_projector.")
"""What the names of tensors begin with that a file of the text part does not have."""


def _canonical_name(name: str) -> str:
    return name.removeprefix("language_model.")


def _drops(config: DeepseekConfig, options: LatentOptions) -> tuple[Drop, ...]:
    vision = Drop(lambda name: name.startswith(VISION_PARTS), "vision part; the file holds the text part")
    return (*drops(config, options), vision)


ARCHITECTURE = replace(DEEPSEEK2, hf_names=(KIMI_VL, KIMI_K25), canonical_name=_canonical_name, drops=_drops)
