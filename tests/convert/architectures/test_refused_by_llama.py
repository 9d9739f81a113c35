"""Configurations that llama.cpp computes otherwise, and that no note could mend: refused in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import convert
from convert.checkpoint.checkpoint import read_json_object
from gguf_tools.errors import BadConfig, CheckpointError
from tests.support.checkpoints import edit_config
from tests.support.published_models import write

CASES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("exaone-4", {"sliding_window": 16}, "3 layers with a sliding_window of 16: .* in models of 64 layers"),
    ("exaone-4", {"head_dim": 32}, "head_dim is 32, expected 16"),
    ("qwen2-moe", {"layer_types": ["sliding_attention"] * 3}, "layer_types .* use_sliding_window is false"),
    ("hunyuan-moe", {"moe_intermediate_size": [96, 64]}, "moe_intermediate_size"),
    ("hunyuan", {"attention_bias": True}, "attention_bias is True, expected False"),
    ("hy-v3", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
    ("solar-open", {"use_qk_norm": True}, "use_qk_norm is True, expected False"),
    ("ernie-4.5", {"use_bias": True}, "use_bias is True, expected False"),
    ("ernie-4.5-moe", {"moe_layer_interval": 2}, "moe_layer_interval is 2, expected 1"),
    ("gemma-2", {"rope_theta": 20000.0}, "another rope_theta than 10000"),
    ("gemma-2", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    ("gemma-2", {"final_logit_softcapping": None}, "final_logit_softcapping"),
    ("laguna", {"num_attention_heads_per_layer": [4, 6, 8, 6]}, r"6 to 8 heads \(num_attention_heads_per_"),
    ("laguna", {"gating": False}, "gating is False, expected true"),
    ("minimax-m3", {"moe_layer_freq": [0, 1, 1, 1]}, "layer_types .* where mlp_layer_types is 'sparse'"),
    ("llama-4", {"attention_chunk_size": None}, "attention_chunk_size is None, expected 8192"),
    ("llama-4", {"no_rope_layers": [1, 1, 1, 1]}, "no_rope_layers is .* expected .*0"),
    ("llama-4", {"moe_layers": [1, 2]}, r"moe_layers is \[1, 2\], expected \[1, 3\]"),
    ("llama-4", {"partial_rotary_factor": 0.5}, "partial_rotary_factor .* is 0.5, expected 1"),
    ("llama-4", {"use_qk_norm": False}, "use_qk_norm is False, expected True"),
    ("command-r7b", {"head_dim": 32}, "head_dim is 32, expected 16: llama.cpp's cohere2 divides"),
    ("glm-5.3-flash", {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail is False"),
    ("glm-5.3-flash", {"linear_attn_config": None}, "linear_num_heads is 64, expected 4"),
    ("ling-3-flash", {"num_local_experts": 16}, "num_local_experts is 16, expected 8: num_experts says so"),
    ("ling-3-flash", {"num_mtp_layers": 2}, "num_mtp_layers is 2, expected 1"),
    ("ling-3-flash", {"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
    ("hunyuan-moe", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1, expected 2: moe_topk says so"),
    ("ernie-4.5-moe", {"num_experts": 2}, "num_experts is 2, expected .*: moe_num_experts says so"),
    ("mimo-v2-flash", {"layer_types": ["full_attention"] * 4}, "layer_types is .* hybrid_layer_pattern says"),
    ("mimo-v2-flash", {"rms_norm_eps": 0.5}, "layernorm_epsilon is 1e-05, expected 0.5"),
    ("minimax-m3", {"rotary_dim": 8}, "rotary_dim is 8, expected 16"),
    ("minimax-m3", {"num_key_value_heads": 4}, r"2 heads \(index_n_heads\), expected 4"),
    ("minimax-m3", {"shared_intermediate_size": 64}, "shared_intermediate_size is 64"),
    ("step-3.5", {"rope_theta": [1e4, 1e4, 2e4, 1e4]}, "rope_theta is .* one for layers with a window"),
    ("step-3.5", {"rope_theta": [None] * 4}, "rope_theta of full_attention is None, expected a positive"),
    ("step-3.5", {"partial_rotary_factors": [1.0] * 4}, "partial_rotary_factors is .* expected 1 for layers"),
    (
        "step-3.5",
        {"layer_types": ["full_attention"] * 6, "partial_rotary_factors": [0.5] * 6},
        "has no layer of slid",
    ),
    (
        "step-3.7",
        {"partial_rotary_factors": None},
        "no partial_rotary_factors|is None, expected 1 for layers",
    ),
    ("step-3.7", {"attention_other_setting": 2}, "attention_other_setting is 2, expected an object"),
    ("step-3.7", {"per_layer_config": {}}, "per_layer_config is {}, expected what layer_types and"),
    ("step-3.7", {"num_local_experts": 8}, "num_local_experts is 8, expected 6: moe_num_experts says so"),
    ("step-3.5", {"moe_layers_enum": "1,3"}, "moe_layers_enum is '1,3', expected the numbers of the last"),
    ("phi-3.5-moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, expected 1"),
    ("k-exaone", {"layer_types": ["full_attention"] * 5}, "expected a layer with a window"),
)


@pytest.mark.parametrize(("name", "changes", "words"), CASES)
def test_refused(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path / "model")
    text = read_json_object(folder / "config.json").get("text_config")
    edit_config(folder, **(changes if text is None else {"text_config": text | changes}))
    with pytest.raises((BadConfig, CheckpointError), match=words) as caught:
        convert.convert(folder, tmp_path / "out.gguf", outtype="bf16")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.gguf").exists()
