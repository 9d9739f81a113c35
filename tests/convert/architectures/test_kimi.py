"""Kimi Linear and Kimi K3: what their config.json may say, the tokenizer, and files that llama.cpp loads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
import quantize
from gguf_tools import open_gguf
from gguf_tools.errors import BadConfig, ToolkitError, UnsupportedCheckpoint
from quantize.plan.decide import PlanOptions
from tests.support import oracle
from tests.support.checkpoints import edit_tensors
from tests.support.published_checkpoint import write_published
from tests.support.published_kimi import KIMI_MODELS
from tests.support.published_models import write

torch = pytest.importorskip("torch")

from imatrix.forward.observe import Silent  # noqa: E402
from imatrix.forward.open import open_model  # noqa: E402
from tests.imatrix.forward.small_models import run_all_layers  # noqa: E402
from tests.imatrix.forward.test_differentiate import differentiate, directions  # noqa: E402

TOKENS = np.random.RandomState(1).randint(3, 550, 60)
STEP = 1e-3


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config.get("text_config", config))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "field", "value", "error", "told"),
    [
        ("kimi-linear", "q_lora_rank", 16, UnsupportedCheckpoint, "does not compress queries"),
        ("kimi-linear", "moe_renormalize", False, UnsupportedCheckpoint, "always normalises"),
        ("kimi-linear", "mla_use_nope", False, UnsupportedCheckpoint, "mla_use_nope"),
        ("kimi-linear", "rope_scaling", {"type": "yarn", "factor": 4.0}, BadConfig, "rotates nothing"),
        (
            "kimi-linear",
            "linear_attn_config",
            {"num_heads": 8},
            UnsupportedCheckpoint,
            r"linear_attn_config\.num_heads",
        ),
        ("kimi-linear", "linear_attn_config", {"full_attn_layers": 2}, BadConfig, "full_attn_layers"),
        ("kimi-linear", "linear_attn_config", {"full_attn_layers": []}, UnsupportedCheckpoint, "full_att"),
        ("kimi-k3", "linear_attn_config", {"gate_lower_bound": 1.0}, BadConfig, "a number below 0"),
        ("kimi-k3", "hidden_act", "silu", UnsupportedCheckpoint, "expected 'situ'"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(
    name: str, field: str, value: Any, error: type[ToolkitError], told: str, tmp_path: Path
) -> None:
    def change(config: dict[str, Any]) -> None:
        config[field] = {**config[field], **value} if field == "linear_attn_config" else value

    folder = changed(write(name, tmp_path / "m"), change)
    with pytest.raises(error, match=told):
        convert.convert(folder, tmp_path / "m.gguf")


def test_layers_follow_from_layer_types_as_well(tmp_path: Path) -> None:
    folder = write("kimi-linear", tmp_path / "m")
    kinds = ["linear_attention", "full_attention"] * 2

    def told_otherwise(config: dict[str, Any]) -> None:
        net = config.pop("linear_attn_config")
        config |= {"layer_types": kinds, "linear_head_dim": net["head_dim"], "linear_num_heads": 4}

    convert.convert(folder, tmp_path / "lists.gguf", provenance=False)
    convert.convert(changed(folder, told_otherwise), tmp_path / "types.gguf", provenance=False)
    assert (tmp_path / "types.gguf").read_bytes() == (tmp_path / "lists.gguf").read_bytes()


def test_groups_of_experts_are_written(tmp_path: Path) -> None:
    """llama.cpp's converter omits their number, and llama.cpp then chooses among all experts."""
    folder = changed(
        write("kimi-linear", tmp_path / "m"), lambda config: config.update(num_expert_group=3, topk_group=2)
    )
    convert.convert(folder, tmp_path / "m.gguf")
    with open_gguf(tmp_path / "m.gguf") as file:
        assert file.get("kimi-linear.expert_group_count") == 3
        assert file.get("kimi-linear.expert_group_used_count") == 2


def test_the_published_tokenizer(tmp_path: Path) -> None:
    model = KIMI_MODELS["kimi-linear"]
    tokens = {"vocab_size": 812, "bos_token_id": 556, "eos_token_id": 558}
    folder = write_published(
        replace(model, config={**model.config, **tokens}, tokenizer="kimi-k2"), tmp_path / "m"
    )
    convert.convert(folder, tmp_path / "m.gguf")
    with open_gguf(tmp_path / "m.gguf") as file:
        assert file.get("tokenizer.ggml.pre") == "kimi-k2"
        assert file.get("tokenizer.ggml.eos_token_id") == 558


needs_oracle = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")


def logits_of(path: Path) -> np.ndarray:
    with open_model(path) as source:
        return run_all_layers(source, TOKENS[None])[0][0]


def assert_computed(folder: Path, plain: Path) -> None:
    """Compare a folder's logits with those that llama.cpp computes of a file of the same weights."""
    with oracle.Model(plain) as model:
        expected = model.logits(TOKENS.tolist())
    for path in (folder, plain):
        error = np.linalg.norm(logits_of(path) - expected) / np.linalg.norm(expected)
        assert error < 1e-5


@needs_oracle
@pytest.mark.parametrize(
    "change",
    [
        {},
        *(pytest.param(each, marks=pytest.mark.slow) for each in (
            {"attn_res_block_size": 3}, {"attn_res_block_size": 1}, {"activation_situ_linear_beta": 0},
            {"activation_situ_beta": 0.5, "activation_situ_linear_beta": 0.7, "moe_renormalize": False},
        )),
    ],
)  # fmt: skip
def test_kimi_k3_is_computed_as_llama_cpp_does(change: dict[str, Any], tmp_path: Path) -> None:
    folder = changed(write("kimi-k3-bf16", tmp_path / "m"), lambda config: config.update(change))
    convert.convert(folder, tmp_path / "m.gguf", outtype="f32")
    assert_computed(folder, tmp_path / "m.gguf")


@needs_oracle
def test_kimi_k3_without_kept_states_is_computed(tmp_path: Path) -> None:
    folder = write("kimi-k3-bf16", tmp_path / "m")
    changed(folder, lambda config: config.update(attn_res_block_size=0))
    scores = re.compile(r"_res_(norm|proj)|output_attn_res")
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if scores.search(name)])
    convert.convert(folder, tmp_path / "m.gguf", outtype="f32")
    assert_computed(folder, tmp_path / "m.gguf")


@needs_oracle
def test_kimi_k3_with_packed_experts_is_computed(tmp_path: Path) -> None:
    """llama.cpp rounds what codes multiply, so it is given the weights that they stand for."""
    folder = write("kimi-k3", tmp_path / "m")
    convert.convert(folder, tmp_path / "m.gguf", outtype="f32")
    options = quantize.QuantizeOptions(types=PlanOptions(allow_requantize=True))
    quantize.quantize(tmp_path / "m.gguf", tmp_path / "f32.gguf", "F32", options)
    assert_computed(folder, tmp_path / "f32.gguf")


def test_gradients_of_kimi_k3_are_slopes(tmp_path: Path) -> None:
    """All embeddings are made larger and smaller, which shows behind the end as states are kept.

    Every token goes to all experts: a choice of some of them would jump.
    """
    folder = changed(write("kimi-k3-bf16", tmp_path / "m"), lambda c: c.update(num_experts_per_token=6))
    with open_model(folder) as source:
        load = source.loader(torch.device("cpu"), torch.float32)
        embeddings, output = (load.float32(f"{name}.weight", 576, 64) for name in ("token_embd", "output"))

        def behind_end(scale: float) -> np.ndarray:
            scaled = replace(source, network=replace(source.network, embedding_scale=scale))
            logits, _ = run_all_layers(scaled, TOKENS[None])
            return logits[0] @ np.linalg.pinv(output.numpy()).T

        change = behind_end(1 + STEP) - behind_end(1 - STEP)
        found = differentiate(source, Silent(), behind_end=True, chunks=TOKENS[None])
    slope = float((directions(*change.shape).numpy() * change).sum() / (2 * STEP))
    assert float((found * embeddings[TOKENS].numpy()).sum()) == pytest.approx(slope, rel=0.01)
