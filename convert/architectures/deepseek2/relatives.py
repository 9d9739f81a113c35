"""DeepSeek V3.2, and families that are DeepSeek's but for a few things, a block for each."""

from __future__ import annotations

from convert.architectures.deepseek2.config import DeepseekConfig, Defaults
from convert.architectures.deepseek2.deepseek32 import DEEPSEEK_V32, indexed
from convert.architectures.deepseek2.family import common_notes, notes, relative
from convert.architectures.options import LatentOptions
from convert.tokenizer.files import GLM

# ---- Youtu-LLM: with experts or without

_YOUTU = relative("YoutuForCausalLM", defaults=Defaults(experts=False, tied=True))


# ---- Kimi-VL and Kimi K2.5: the text part is a V3 under names that begin with `language_model.`

_KIMI = relative(
    "KimiVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    is_vision=lambda name: name.startswith(("vision_tower.", "multi_modal_projector.", "mm_projector.")),
)


# ---- GLM-5, llama.cpp's `glm-dsa`: V3.2's tensors and keys with GLM's tokenizer. Its layers may share an
# indexer's choice (`indexer_types`).

GLM_DSA = "GlmMoeDsaForCausalLM"


def _glm_dsa_notes(config: DeepseekConfig, options: LatentOptions) -> tuple[str, ...]:
    yarn = "YaRN: llama.cpp's glm-dsa reads nothing of mscale_all_dim, and computes other attention scores"
    return (*common_notes(config, options), *((yarn,) if config.yarn is not None else ()))


GLM5 = indexed(
    GLM_DSA,
    "glm-dsa",
    Defaults(groups=(1, 1), eps=1e-5, index_heads=32, may_share=True),
    notes=_glm_dsa_notes,
    quirks=GLM,
    unset_gating="sigmoid",
)


# ---- GLM-4.7-Flash: V3's tensors and keys with GLM's tokenizer and MTP layer


def _flash_notes(config: DeepseekConfig, options: LatentOptions) -> tuple[str, ...]:
    return (
        *notes(config, options),
        f"expert_gating_func is written ({config.scoring_func}), which llama.cpp's converter leaves out: its"
        " files are read as softmax unless they have the size of GLM-4.7-Flash",
    )


_GLM4_MOE_LITE = relative(
    "Glm4MoeLiteForCausalLM",
    defaults=Defaults(scale=1.8, groups=(1, 1), dense=1, eps=1e-5),
    keeps_mtp=True,
    notes=_flash_notes,
    quirks=GLM,
)


FAMILIES = (DEEPSEEK_V32, _YOUTU, _KIMI, GLM5, _GLM4_MOE_LITE)
