"""GLM-4.7-Flash: DeepSeek V3's tensors and keys with GLM's tokenizer and MTP layer."""

from __future__ import annotations

from convert.architectures.deepseek2.config import DeepseekConfig, Defaults
from convert.architectures.deepseek2.family import notes, relative
from convert.architectures.options import LatentOptions
from convert.tokenizer.files import GLM


def _notes(config: DeepseekConfig, options: LatentOptions) -> tuple[str, ...]:
    return (
        *notes(config, options),
        f"expert_gating_func is written ({config.scoring_func}), which llama.cpp's converter leaves out: its"
        " files are read as softmax unless they have the size of GLM-4.7-Flash",
    )


ARCHITECTURE = relative(
    "Glm4MoeLiteForCausalLM",
    defaults=Defaults(scale=1.8, groups=(1, 1), dense=1, eps=1e-5),
    keeps_mtp=True,
    notes=_notes,
    quirks=GLM,
)
