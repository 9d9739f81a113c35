"""The toy family: all of its parts together."""

from __future__ import annotations

from convert.architectures.base import Architecture
from tests.end_to_end.toy_family.config import NAME, ToyConfig
from tests.end_to_end.toy_family.metadata import METADATA
from tests.end_to_end.toy_family.options import Options
from tests.end_to_end.toy_family.rules import RULES, drops

ARCHITECTURE = Architecture(
    hf_names=(NAME,),
    gguf_name="toy",
    options=Options,
    read_config=ToyConfig.from_dict,
    rules=RULES,
    drops=drops,
    metadata=METADATA,
)
