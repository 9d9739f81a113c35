"""Names of DeepSeek V4's weights in transformers 5, brought to the published ones.

The table is the inverse of the one that transformers 5.24 reads published checkpoints with ("deepseek_v4" in
conversion_mapping.py). Its own inverse goes wrong for a few names, which it saves half-renamed.
"""

from __future__ import annotations

_PARTS = (
    ("embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("hc_head.hc_", "hc_head_"),
    (".self_attn.", ".attn."),
    (".mlp.", ".ffn."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    (".sinks", ".attn_sink"),
    (".compressor.indexer.scorer.weights_proj.", ".indexer.weights_proj."),
    (".compressor.indexer.q_b_proj.", ".indexer.wq_b."),
    (".compressor.indexer.", ".indexer.compressor."),
    (".compressor.kv_norm.", ".compressor.norm."),
    (".compressor.gate_proj.", ".compressor.wgate."),
    (".position_bias", ".ape"),
    (".kv_proj.", ".wkv."),
    (".q_a_proj.", ".wq_a."),
    (".q_a_norm.", ".q_norm."),
    (".q_b_proj.", ".wq_b."),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".attn.norm.", ".attn.kv_norm."),
    (".e_score_correction_bias", ".bias"),
    (".shared_experts.gate_proj.", ".shared_experts.w1."),
    (".shared_experts.down_proj.", ".shared_experts.w2."),
    (".shared_experts.up_proj.", ".shared_experts.w3."),
)
"""Parts of names -> published parts, in the order in which they are replaced."""


def published_name(name: str) -> str:
    """Return the published name of a weight; published names stay as they are."""
    name = name.removeprefix("model.")
    for part, published in _PARTS:
        name = name.replace(part, published, 1)
    return name
