"""The family of GLM-5: DeepSeek V3.2's under its own name, with another tokenizer."""

from __future__ import annotations

from dataclasses import replace

from convert.architectures.deepseek2.config import GLM_DSA
from convert.architectures.deepseek2.deepseek32 import ARCHITECTURE as DEEPSEEK32
from convert.tokenizer.family_quirks import GLM

ARCHITECTURE = replace(DEEPSEEK32, hf_names=(GLM_DSA,), gguf_name="glm-dsa", quirks=GLM)
