"""Youtu-LLM: DeepSeek V3's attention, with experts or without."""

from __future__ import annotations

from convert.architectures.deepseek2.config import Defaults
from convert.architectures.deepseek2.family import relative

ARCHITECTURE = relative("YoutuForCausalLM", defaults=Defaults(experts=False, tied=True))
