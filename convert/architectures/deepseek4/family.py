"""The DeepSeek V4 family: all of its parts together.

There is no free choice of output type: codes of experts and routing tables stay as they are stored, matrices
that are FP8 become Q8_0, BF16 stays BF16 and F32 stays F32, as in llama.cpp's converter.
"""

from __future__ import annotations

from convert.architectures.arrange import OutputTensor
from convert.architectures.base import Architecture
from convert.architectures.deepseek4.config import NAME, V4Config
from convert.architectures.deepseek4.metadata import METADATA
from convert.architectures.deepseek4.options import Options
from convert.architectures.deepseek4.rules import RULES, drops
from gguf_tools.format.ggml_types import BF16, F32, I32, MXFP4, Q8_0, GGMLType


def _settled(tensor: OutputTensor) -> GGMLType | None:
    """Return the type that a matrix has under every --outtype, None for what the general rules decide."""
    if len(tensor.shape) < 2 or tensor.name.endswith("_norm.weight"):
        return None
    if tensor.stored_as.startswith("F8_"):
        return Q8_0
    return {"BF16": BF16, "F32": F32}.get(tensor.stored_as)


def _notes(config: V4Config, options: Options) -> tuple[str, ...]:
    return ("--outtype counts for nothing: FP8 becomes Q8_0, all else keeps the type of the checkpoint",)


ARCHITECTURE = Architecture(
    hf_names=(NAME,),
    gguf_name="deepseek4",
    options=Options,
    read_config=V4Config.from_dict,
    n_experts=lambda config: config.n_routed_experts,
    rules=RULES,
    drops=drops,
    metadata=METADATA,
    notes=_notes,
    logical=lambda name: name.removeprefix("model."),
    kept=frozenset({MXFP4, I32}),
    settled=_settled,
)
