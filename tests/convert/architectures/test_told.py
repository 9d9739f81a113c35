"""What llama.cpp computes otherwise, or has no place for, is told or refused in every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.architectures import find_architecture
from convert.architectures.options import make_options
from convert.pipeline import open_conversion
from gguf_tools.errors import BadConfig, UnexpectedTensors
from tests.support.checkpoints import edit_tensors
from tests.support.decoder_models import decoder_model
from tests.support.published_models import write

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

PLAIN: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {}, "MistralForCausalLM": {"sliding_window": None}, "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {}, "Qwen3MoeForCausalLM": {**_MOE, "norm_topk_prob": True}, "SeedOssForCausalLM": {},
    "SmolLM3ForCausalLM": {}, "Olmo2ForCausalLM": {}, "GraniteForCausalLM": {},
    "MiniMaxM2ForCausalLM": {**_MOE, "num_local_experts": 4},
    "GptOssForCausalLM": {**_MOE, "num_local_experts": 4},
    "Glm4MoeForCausalLM": {**_MOE, "n_routed_experts": 4},
}  # fmt: skip
"""Families that rotate by YaRN, with what they need besides sizes."""

LLAMA3 = {"LlamaForCausalLM", "MistralForCausalLM", "GraniteForCausalLM"}
"""Those whose files say the rotation of Llama 3."""


def notes(name: str, **config: Any) -> str:
    raw = {"architectures": [name], **_SIZES, **PLAIN.get(name, {}), **config}
    family = find_architecture(raw)
    read = family.read_config(raw, Path("config.json"))
    return "\n".join(family.notes(read, make_options(family.options, {}, name)))


def yarn(**values: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **values}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", PLAIN)
def test_the_ends_of_yarn_s_ramp(name: str, spelling: str) -> None:
    plain = notes(name, **{spelling: yarn()})
    assert "YaRN" not in plain
    assert "--yarn-beta-slow 2" in notes(name, **{spelling: yarn(beta_slow=2.0)})
    assert "--yarn-beta-fast 16" in notes(name, **{spelling: yarn(beta_fast=16)})
    assert "truncate" in notes(name, **{spelling: yarn(truncate=False)})


@pytest.mark.parametrize("name", PLAIN)
def test_the_rotation_of_llama_3(name: str) -> None:
    told = "llama3" in notes(name, rope_scaling={"rope_type": "llama3", "factor": 8.0})
    assert told == (name not in LLAMA3)


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_windows_are_those_of_layer_types(name: str) -> None:
    window = {"use_sliding_window": True, "sliding_window": 16}
    kinds = ["full_attention", "sliding_attention"] * 2
    assert "2 layers of the original see the last 16 positions" in notes(name, **window, layer_types=kinds)
    assert "1 layers" in notes(name, **window, max_window_layers=3)
    assert "positions" not in notes(name, **window, layer_types=["full_attention"] * 4, max_window_layers=0)


def test_the_base_of_layers_with_a_window() -> None:
    by_kind = {"full_attention": yarn(rope_theta=1e4), "sliding_attention": {"rope_theta": 1e4}}
    assert "rope_theta" not in notes("Olmo3ForCausalLM", rope_parameters=by_kind)
    by_kind["sliding_attention"]["rope_theta"] = 5e5
    assert "rope_theta of 500000; llama.cpp takes 10000" in notes("Olmo3ForCausalLM", rope_parameters=by_kind)


def test_the_factor_of_columns_of_a_phi_3_5_moe() -> None:
    rope = {"type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8}  # fmt: skip
    sizes = {"attention_bias": True, "lm_head_bias": True, "num_local_experts": 4}
    factors = {"short_mscale": 1.25, "long_mscale": 1.25}
    told = notes("PhiMoEForCausalLM", **sizes, rope_scaling=rope | factors)
    assert "attn_factor is the model's, 1.25, where llama.cpp's converter writes 1.22474" in told
    assert "SparseMixer" in told
    with pytest.raises(BadConfig, match=r"long_mscale is 1\.5, expected that of short_mscale"):
        notes("PhiMoEForCausalLM", **sizes, rope_scaling=rope | factors | {"long_mscale": 1.5})


@pytest.mark.parametrize("name", ["qwen3", "qwen3moe"])
def test_biases_that_llama_cpp_has_no_place_for(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    decoder_model(name, folder, attention_bias=True)
    refused = pytest.raises(UnexpectedTensors, match=r"o_proj\.bias.* no place for these biases")
    with refused, open_conversion(folder):
        pass

    def without(tensors: dict[str, np.ndarray]) -> None:
        for key in tensors:
            if key.endswith("o_proj.bias"):
                tensors[key] = np.zeros_like(tensors[key])

    edit_tensors(folder, without)
    with open_conversion(folder) as conversion:
        made = {tensor.name for tensor in conversion.tensors}
        assert "blk.0.attn_q.bias" in made
        assert "blk.0.attn_output.bias" not in made
        assert any("a bias of zeros" in note for note in conversion.notes)


@pytest.mark.parametrize("name", ["command-r7b", "gemma-2"])
def test_an_output_matrix_that_llama_cpp_loads_no_file_with_is_left_out(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path / "m")
    edit_tensors(
        folder, lambda stored: stored.update({"lm_head.weight": stored["model.embed_tokens.weight"]})
    )
    with open_conversion(folder) as conversion:
        assert "output.weight" not in {tensor.name for tensor in conversion.tensors}
        assert any("(lm_head.weight): llama.cpp takes the token" in note for note in conversion.notes)
