"""The family of DeepSeek V3.2: all of its parts together."""

from __future__ import annotations

from dataclasses import replace

from convert.architectures.deepseek2.config import V32
from convert.architectures.deepseek2.family import ARCHITECTURE as DEEPSEEK2
from convert.architectures.deepseek2.notes import common_notes
from convert.architectures.deepseek32.config import IndexedConfig
from convert.architectures.deepseek32.metadata import METADATA
from convert.architectures.deepseek32.rules import RULES
from convert.tokenizer.family_quirks import Habits

ARCHITECTURE = replace(
    DEEPSEEK2,
    hf_names=(V32,),
    gguf_name="deepseek32",
    read_config=IndexedConfig.from_dict,
    rules=RULES,
    metadata=METADATA,
    notes=common_notes,
    habits=Habits(adds_bos=True),
)
