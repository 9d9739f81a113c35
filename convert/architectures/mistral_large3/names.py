"""Mistral's names of weights, brought to DeepSeek's."""

from __future__ import annotations

import re
from collections.abc import Mapping

_ENDS: Mapping[str, str] = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "gate": "mlp.gate",
}
_BLOCKS: Mapping[str, str] = {"feed_forward": "mlp", "shared_experts": "mlp.shared_experts"}
_PROJECTIONS: Mapping[str, str] = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_BLOCK = re.compile(r"(?:experts\.(?P<expert>\d+)|(?P<block>\w+))\.(?P<part>w[123])")


def logical(name: str) -> str:
    """Return DeepSeek's name of a weight; a name that Mistral Large 3 doesn't have stays as it is."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _ENDS.get(name, name)
    inner = _IN_LAYER.get(layer[2])
    block = _BLOCK.fullmatch(layer[2])
    if block is not None:
        expert, part = block["expert"], _PROJECTIONS[block["part"]]
        place = f"mlp.experts.{expert}" if expert is not None else _BLOCKS.get(block["block"])
        inner = place and f"{place}.{part}"
    return name if inner is None else f"model.layers.{layer[1]}.{inner}.weight"
