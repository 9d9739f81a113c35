"""DeepSeek V2, V2.5, V3, V3.1, R1 and their derivatives as llama.cpp's `deepseek2`.

    config    what config.json says, checked and complete
    places    where in the model a rule applies
    rules     which weights become which tensors, and which are left out
    metadata  the keys deepseek2.*, written and read back
    notes     what to know before running the file
"""

from __future__ import annotations

from convert.architectures.base import Architecture
from convert.architectures.deepseek2.config import V2, V3, DeepseekConfig
from convert.architectures.deepseek2.metadata import GGUF_NAME, METADATA
from convert.architectures.deepseek2.notes import check, notes
from convert.architectures.deepseek2.rules import RULES, drops

ARCHITECTURE = Architecture(
    hf_names=(V2, V3),
    gguf_name=GGUF_NAME,
    read_config=DeepseekConfig.from_dict,
    n_experts=lambda config: config.n_routed_experts,
    rules=RULES,
    drops=drops,
    metadata=METADATA,
    notes=notes,
    check=check,
)
