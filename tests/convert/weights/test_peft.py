"""A base converted with an adapter is what PEFT's merge_and_unload makes of both, converted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.pipeline import convert
from gguf_tools.format.shards import open_gguf
from quantize.fill.sources import GGUFTensor
from tests.support.decoder_models import decoder_model

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow

_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "all": ("llama-biases", {"target_modules": _ALL, "bias": "lora_only"}),
    "patterns": (
        "llama-biases",
        {"target_modules": _ALL, "use_rslora": True, "rank_pattern": {"v_proj": 6, "layers.1.mlp.*": 2},
         "alpha_pattern": {"model.layers.0.self_attn.q_proj": 3}},
    ),
    "bias": ("llama-biases", {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
    "some layers": ("llama-biases", {"target_modules": _ALL, "layers_to_transform": [1]}),
    "dora": ("llama-biases", {"target_modules": [*_ALL, "embed_tokens", "lm_head"], "use_dora": True}),
    "embeddings": ("llama-biases", {"target_modules": ["embed_tokens", "lm_head"]}),
    "stored anew": (
        "llama-biases", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]}
    ),
    "tokens": ("llama-biases", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 70]}),
    "tied": ("olmo2-tied", {"target_modules": ["q_proj", "embed_tokens"]}),
    "experts": ("qwen3moe", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS}),
    "down": ("qwen3moe", {"target_modules": [], "target_parameters": _EXPERTS[1:]}),
    "stacks": ("gpt-oss", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS}),
    "square": (
        "gpt-oss", {"target_modules": [], "target_parameters": _EXPERTS[1:], "intermediate_size": 64}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_merged_as_peft_merges(case: str, tmp_path: Path) -> None:
    name, settings = CASES[case]
    sizes = {key: settings[key] for key in settings if key == "intermediate_size"}
    model = decoder_model(name, tmp_path / "base", **sizes)
    merged = _merged(
        model, {key: settings[key] for key in settings if key not in sizes}, tmp_path / "adapter"
    )
    _compare(merged, tmp_path, tmp_path / "base")


def test_embeddings_that_grew(tmp_path: Path) -> None:
    model = decoder_model("llama-biases", tmp_path / "base")
    model.resize_token_embeddings(580)
    merged = _merged(model, {"target_modules": ["q_proj"]}, tmp_path / "adapter", save_embedding_layers=True)
    _compare(merged, tmp_path, tmp_path / "base")


def _merged(model: Any, settings: Mapping[str, Any], folder: Path, **saving: Any) -> Any:
    """Save an adapter of random numbers, and return the model merged with it."""
    import torch

    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings)
    )
    with torch.no_grad():
        for parameter_name, tensor in adapted.named_parameters():
            if "magnitude" in parameter_name:
                tensor.uniform_(0.5, 2)
            elif tensor.requires_grad:
                tensor.normal_(0, 0.2)
    adapted.save_pretrained(folder, **saving)
    return adapted.merge_and_unload()


def _compare(merged: Any, tmp_path: Path, base: Path) -> None:
    folder = tmp_path / "merged"
    merged.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((base / file).read_bytes())
    expected, found = tmp_path / "expected.gguf", tmp_path / "found.gguf"
    convert(folder, expected, "f32", provenance=False)
    convert(base, found, "f32", lora=tmp_path / "adapter", provenance=False)
    with open_gguf(expected) as theirs, open_gguf(found) as ours:
        assert list(theirs.tensors) == list(ours.tensors)
        for name, info in theirs.tensors.items():
            rows = [GGUFTensor(file, name).read_rows(0, info.n_rows) for file in (theirs, ours)]
            np.testing.assert_allclose(rows[1], rows[0], rtol=2e-5, atol=2e-6, err_msg=name)
