"""Kimi-VL and Kimi K2.5: their text part is a DeepSeek V3 under names that begin with `language_model.`"""

from __future__ import annotations

from convert.architectures.deepseek2.family import relative

ARCHITECTURE = relative(
    "KimiVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    is_vision=lambda name: name.startswith(("vision_tower.", "multi_modal_projector.", "mm_projector.")),
)
