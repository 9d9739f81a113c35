"""What the user may choose about the conversion of a DeepSeek model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gguf_tools.errors import BadRequest
from quantize.roles import LAYOUTS, MLALayout

_MTP_HELP = (
    "keep the multi-token-prediction layers; without a word, as convert_hf_to_gguf.py: kept for GLM and for"
    " DeepSeek V3.2 (its own --mtp writes these layers alone, to a file of their own)"
)


@dataclass(frozen=True)
class Options:
    """Choices about a DeepSeek model.

    mla  "split"  attn_k_b and attn_v_b, a matrix per head: what llama.cpp wants
         "both"   attn_kv_b as well, all three as one matrix: what ik_llama.cpp wants
         "none"   only attn_kv_b: plain attention, with its large cache
    mtp  keep the multi-token-prediction layers; None: as llama.cpp's converter does for the model
    """

    mla: Annotated[MLALayout, "layout of attention (default: split)"] = "split"
    mtp: Annotated[bool | None, _MTP_HELP] = None

    def __post_init__(self) -> None:
        if self.mla not in LAYOUTS:
            raise BadRequest(f"MLA layout {self.mla!r}, expected {', '.join(LAYOUTS)}")
