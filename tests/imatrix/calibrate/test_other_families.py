"""Families whose layers have other parts than most, calibrated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
import gguf_tools
import quantize
from gguf_tools import open_gguf
from tests.support.decoder_models import SHALLOW_GEMMA3N, decoder_model
from tests.support.trained_model import calibration_text

pytest.importorskip("torch")
pytest.importorskip("transformers")

from imatrix.forward.options import ForwardOptions
from imatrix.texts.tokens import Cut

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
"""Sizes that fill blocks of 256."""

MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "phi4": ({}, ("attn_qkv", "ffn_up", "ffn_down")),
    "granite4-h": (
        {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 256,
         "mamba_n_heads": 8, "mamba_d_head": 64},
        ("ssm_in", "ssm_out", "ffn_up_exps", "ffn_down_shexp"),
    ),
    "nemotron-h": (
        {"layers_block_type": ["mlp", "linear_attention", "full_attention"], "mamba_num_heads": 16},
        ("ffn_up", "ffn_down"),
    ),
    "nemotron-3": (
        {"layers_block_type": ["moe", "linear_attention", "full_attention", "moe"], "mamba_num_heads": 16,
         "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 256},
        ("ffn_up_exps", "ffn_down_exps", "ffn_up_shexp", "ffn_down_shexp"),
    ),
    "nemotron-3-super": (
        {"layers_block_type": ["moe", "linear_attention", "full_attention"], "mamba_num_heads": 16,
         "moe_intermediate_size": 256, "moe_latent_size": 256, "moe_shared_expert_intermediate_size": 256},
        ("ffn_latent_down", "ffn_latent_up", "ffn_up_exps", "ffn_down_exps", "ffn_down_shexp"),
    ),
    "olmo2": ({}, ("attn_q", "ffn_gate", "ffn_down")),
    "gemma2": ({"query_pre_attn_scalar": 64}, ("attn_q", "ffn_down")),
    "gemma3": ({"query_pre_attn_scalar": 64}, ("attn_q", "ffn_down")),
    "glm4": ({}, ("attn_k", "ffn_up", "ffn_down")),
    "hunyuanmoe": ({}, ("attn_k", "ffn_up_exps", "ffn_up_shexp")),
    "exaone4": ({}, ("attn_q", "ffn_gate")),
    "exaone-moe": (
        {"moe_intermediate_size": 256, "first_k_dense_replace": 0},
        ("attn_q", "ffn_up_exps", "ffn_down_shexp"),
    ),
    "apertus": ({}, ("attn_q", "ffn_up", "ffn_down")),
    "llama4": (
        {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 256},
        ("attn_q", "ffn_up_exps", "ffn_down_exps", "ffn_up_shexp"),
    ),
    "qwen2moe": (
        {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
        ("attn_q", "ffn_up_exps", "ffn_down_shexp"),
    ),
    "kimi-linear": (
        {"moe_intermediate_size": 256, "v_head_dim": 64, "kv_lora_rank": 256, "first_k_dense_replace": 0,
         "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "head_dim": 64, "num_heads": 4,
                                "short_conv_kernel_size": 4}},
        ("attn_q", "ssm_f_a", "ssm_g_a", "attn_output", "ffn_up_exps"),
    ),
    "ling3-compressed": (
        {"moe_intermediate_size": 256, "v_head_dim": 64, "kv_lora_rank": 256, "head_dim": 64,
         "first_k_dense_replace": 0},
        ("attn_q", "ssm_f_a", "ssm_g_a", "attn_output", "ffn_up_exps"),
    ),
    "ernie4.5-moe": (
        {"moe_intermediate_size": 256, "moe_num_shared_experts": 1, "moe_layer_start_index": 0},
        ("attn_q", "ffn_down_exps", "ffn_up_shexp"),
    ),
    "gemma4-experts": (
        {"layer_types": None, "moe_intermediate_size": 256},
        ("attn_v", "ffn_up", "ffn_down", "ffn_gate_up_exps", "ffn_down_exps"),
    ),
    "gemma4-small": (
        {"layer_types": ["full_attention"] * 2, "hidden_size_per_layer_input": 256,
         "num_kv_shared_layers": 1},
        ("attn_k", "ffn_down", "inp_gate", "proj"),
    ),
    "gemma3n": (SHALLOW_GEMMA3N, ("attn_q", "ffn_up", "ffn_down", "inp_gate", "proj")),
}  # fmt: skip
"""Model -> what differs, and matrices of the first layer."""


@pytest.mark.slow
@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_calibrated_file_is_nearer(name: str, sequential: bool, tmp_path: Path) -> None:
    changes, matrices = MODELS[name]
    decoder_model(name, tmp_path / "model", **{**WIDE, **changes})
    text, base = tmp_path / "text.txt", tmp_path / "base.gguf"
    text.write_bytes(calibration_text())
    convert.convert(tmp_path / "model", base, outtype="f32")
    quantize.quantize(base, tmp_path / "stock.gguf", "Q2_K")
    calibration = gguf_tools.Calibration(text, Cut(128, n_chunks=16), sequential=sequential)
    quantize.quantize(
        base, tmp_path / "calibrated.gguf", "Q2_K", quantize.QuantizeOptions(calibration=calibration)
    )
    files = [tmp_path / "stock.gguf", tmp_path / "calibrated.gguf"]
    options = gguf_tools.EvaluateOptions(cut=Cut(128, n_chunks=16), forward=ForwardOptions(n_threads=1))
    done = gguf_tools.evaluate(base, text, files, options)
    stock, calibrated = (model.divergence.kld.mean.value for model in done.models)
    assert calibrated < 0.9 * stock
    with open_gguf(files[0]) as one, open_gguf(files[1]) as other:
        for matrix in matrices:
            name = f"blk.0.{matrix}.weight"
            assert not np.array_equal(one.raw(name), other.raw(name)), name
