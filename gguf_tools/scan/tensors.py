"""Tensors that the architecture has no place for, and types that llama.cpp does not know.

llama.cpp counts the tensors that it has used and refuses a file with more, so a tensor without a place means
a file for another program, or a hiding place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from gguf_tools.findings import Finding, Level
from gguf_tools.format import ggml_types
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.tensors import TensorInfo

_LAYER_PREFIX = re.compile(r"blk\.\d{1,9}\.")
_SCALE_SUFFIX = re.compile(r"\.(?:input_)?scale$")  # of a whole matrix, beside an NVFP4 weight
_FIRST_IK_TYPE = 97

_NORMS = ("attn_norm", "attn_q_a_norm", "attn_kv_a_norm", "ffn_norm")
_ATTENTION = (
    "attn_q", "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_kv_b", "attn_k_b", "attn_v_b", "attn_output",
)  # fmt: skip
_FFN = (
    "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps",
    "ffn_gate_up_exps", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp",
)  # fmt: skip
_NEXTN = tuple(
    f"nextn.{part}"
    for part in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head_norm", "shared_head_head")
)

#: Names by architecture: outside of the layers, and within one.
PLACES: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "deepseek2": (
        frozenset(("token_embd.weight", "output_norm.weight", "output.weight")),
        frozenset(f"{part}.weight" for part in (*_NORMS, *_ATTENTION, *_FFN, *_NEXTN)) | {"exp_probs_b.bias"},
    ),
}


def check_tensors(architecture: str, tensors: Mapping[str, TensorInfo]) -> Iterator[Finding]:
    """Report tensors without a place, if the architecture is known, and types that are not llama.cpp's."""
    if architecture in PLACES:
        for name in tensors:
            if not _has_place(name, *PLACES[architecture]):
                text = f"no part of a {architecture} model has such a tensor"
                yield Finding("tensor", text, Level.WARNING, (name,))
    by_type: dict[GGMLType, list[str]] = {}
    for info in tensors.values():
        by_type.setdefault(info.type, []).append(info.name)
    for type_, names in by_type.items():
        if remark := _remark(type_):
            level, text = remark
            yield Finding("type", f"{type_.name}, of {len(names):,} tensors, {text}", level, (names[0],))


def _has_place(name: str, outside: frozenset[str], in_layer: frozenset[str]) -> bool:
    match = _LAYER_PREFIX.match(name)
    name = _SCALE_SUFFIX.sub(".weight", name)
    return name[match.end() :] in in_layer if match else name in outside


def _remark(type_: GGMLType) -> tuple[Level, str] | None:
    if type_.is_internal or "removed" in type_.note:
        return Level.WARNING, f"is in no file that a program of today writes: {type_.note}"
    if type_.id >= _FIRST_IK_TYPE or type_ is ggml_types.I2_S:
        return Level.NOTE, "is a type of ik_llama.cpp's; llama.cpp refuses the file"
    return None
