"""The family of GLM-4.7-Flash: DeepSeek's with another tokenizer."""

from __future__ import annotations

from dataclasses import replace

from convert.architectures.deepseek2.config import GLM_LITE
from convert.architectures.deepseek2.family import ARCHITECTURE as DEEPSEEK2
from convert.tokenizer.family_quirks import GLM

ARCHITECTURE = replace(DEEPSEEK2, hf_names=(GLM_LITE,), quirks=GLM)
