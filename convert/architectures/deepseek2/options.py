"""What the user may choose about the conversion of a DeepSeek model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gguf_tools.errors import BadRequest
from quantize.mla_layout.names import LAYOUTS, MLALayout

_MTP_HELP = (
    "keep the multi-token-prediction layers, which are left out otherwise (in convert_hf_to_gguf.py, --mtp"
    " writes these layers alone, to a file of their own)"
)


@dataclass(frozen=True)
class Options:
    """Choices about a DeepSeek model.

    mla  "split"  attn_k_b and attn_v_b, a matrix per head: what llama.cpp wants
         "both"   attn_kv_b as well, all three as one matrix: what ik_llama.cpp wants
         "none"   only attn_kv_b: plain attention, with its large cache
    mtp  keep the multi-token-prediction layers
    """

    mla: Annotated[MLALayout, "layout of attention (default: split)"] = "split"
    mtp: Annotated[bool, _MTP_HELP] = False

    def __post_init__(self) -> None:
        if self.mla not in LAYOUTS:
            raise BadRequest(f"MLA layout {self.mla!r}, expected {', '.join(LAYOUTS)}")
