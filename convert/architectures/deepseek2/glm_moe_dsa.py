"""GLM-5 as llama.cpp's `glm-dsa`: DeepSeek V3.2's tensors and keys with GLM's tokenizer.

Its layers may share an indexer's choice (`indexer_types`).
"""

from __future__ import annotations

from convert.architectures.deepseek2.config import DeepseekConfig
from convert.architectures.deepseek2.deepseek32 import IndexedDefaults, indexed
from convert.architectures.deepseek2.family import common_notes
from convert.architectures.options import LatentOptions
from convert.tokenizer.files import GLM

GLM_DSA = "GlmMoeDsaForCausalLM"


def _notes(config: DeepseekConfig, options: LatentOptions) -> tuple[str, ...]:
    yarn = "YaRN: llama.cpp's glm-dsa reads nothing of mscale_all_dim, and computes other attention scores"
    return (*common_notes(config, options), *((yarn,) if config.yarn is not None else ()))


ARCHITECTURE = indexed(
    GLM_DSA,
    "glm-dsa",
    IndexedDefaults(groups=(1, 1), eps=1e-5, index_heads=32, may_share=True),
    notes=_notes,
    quirks=GLM,
)
