"""Kimi K3 against llama.cpp: no class of transformers computes it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
import quantize
from quantize.plan.decide import PlanOptions
from tests.support import oracle
from tests.support.checkpoints import edit_tensors
from tests.support.published_models import write

torch = pytest.importorskip("torch")

from imatrix.forward.observe import Silent  # noqa: E402
from imatrix.forward.open import open_model  # noqa: E402
from tests.imatrix.forward.small_models import run_all_layers  # noqa: E402
from tests.imatrix.forward.test_differentiate import differentiate, directions  # noqa: E402

TOKENS = np.random.RandomState(1).randint(3, 550, 60)
STEP = 1e-3


def changed(folder: Path, **changes: Any) -> Path:
    """Change fields of the text part in config.json."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


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
            {"attn_res_block_size": 3}, {"rms_norm_eps": 1e-3},
            {"attn_res_block_size": 1}, {"activation_situ_linear_beta": 0},
            {"activation_situ_beta": 0.5, "activation_situ_linear_beta": 0.7, "moe_renormalize": False},
        )),
    ],
)  # fmt: skip
def test_kimi_k3_is_computed_as_llama_cpp_does(change: dict[str, Any], tmp_path: Path) -> None:
    folder = changed(write("kimi-k3-bf16", tmp_path / "m"), **change)
    convert.convert(folder, tmp_path / "m.gguf", outtype="f32")
    assert_computed(folder, tmp_path / "m.gguf")


@needs_oracle
def test_kimi_k3_without_kept_states_is_computed(tmp_path: Path) -> None:
    folder = write("kimi-k3-bf16", tmp_path / "m")
    changed(folder, attn_res_block_size=0)
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
    folder = changed(write("kimi-k3-bf16", tmp_path / "m"), num_experts_per_token=6)
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
