"""The family of Mistral Large 3: DeepSeek's rules under Mistral's names, with its own configuration."""

from __future__ import annotations

from dataclasses import replace

from convert.architectures.deepseek2.family import ARCHITECTURE as DEEPSEEK2
from convert.architectures.deepseek2.options import Options
from convert.architectures.deepseek2.rules import drops
from convert.architectures.mistral_large3.config import MistralConfig
from convert.architectures.mistral_large3.metadata import METADATA
from convert.architectures.mistral_large3.names import logical
from convert.architectures.rules import Drop
from convert.checkpoint.model_config import MISTRAL_LARGE_3
from convert.tokenizer.family_quirks import Habits

VISION_PARTS = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")
"""What the names of tensors begin with that a file of the text part does not have."""


def _drops(config: MistralConfig, options: Options) -> tuple[Drop, ...]:
    vision = Drop(
        lambda name: name.startswith(VISION_PARTS) or "mm_projector" in name,
        "vision part; the file holds the text part",
    )
    return (*drops(config, options), vision)


ARCHITECTURE = replace(
    DEEPSEEK2,
    hf_names=(MISTRAL_LARGE_3,),
    read_config=MistralConfig.from_dict,
    metadata=METADATA,
    logical=logical,
    drops=_drops,
    habits=Habits(tekken=True),
)
