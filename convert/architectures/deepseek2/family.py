"""The DeepSeek family: all of its parts together."""

from __future__ import annotations

from convert.architectures.base import Architecture
from convert.architectures.deepseek2.config import V2, V3, YOUTU, DeepseekConfig
from convert.architectures.deepseek2.metadata import GGUF_NAME, METADATA
from convert.architectures.deepseek2.notes import check, notes
from convert.architectures.deepseek2.options import Options
from convert.architectures.deepseek2.places import settle
from convert.architectures.deepseek2.rules import RULES, drops
from convert.tokenizer.family_quirks import Habits

ARCHITECTURE = Architecture(
    hf_names=(V2, V3, YOUTU),
    gguf_name=GGUF_NAME,
    options=Options,
    read_config=DeepseekConfig.from_dict,
    n_experts=lambda config: config.n_routed_experts,
    rules=RULES,
    drops=drops,
    metadata=METADATA,
    notes=notes,
    check=check,
    settle=settle,
    # GigaChat3 alone of these cuts text as GPT-2 does; Kimi K2 and Moonlight have tiktoken.model.
    habits=Habits(pre_tokenizers={"gpt-2": "gigachat"}, tiktoken=True),
)
