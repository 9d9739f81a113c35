"""What llama.cpp computes from our tensors and keys against what transformers computes from the checkpoint.

A file is made here in the plainest way (F32, no tokenizer), so a difference is the mapping's fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.checkpoint.checkpoint import Checkpoint
from convert.weights import open_weights
from tests.convert.f32_files import write_f32
from tests.support import oracle
from tests.support.checkpoints import (
    add_mtp_layer,
    edit_config,
    load_transformers,
    read_tensors,
    shard,
    to_fp8,
    to_older_spelling,
    transformers_checkpoint,
    write_checkpoint,
)

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

TOKENS = [int(n) for n in np.random.RandomState(7).randint(0, 320, 48)]


def transformers_logits(folder: Path) -> np.ndarray:
    import torch

    torch.set_num_threads(1)  # the models are so small that threads mostly wait for each other
    with torch.no_grad():
        logits: np.ndarray = load_transformers(folder)(torch.tensor([TOKENS])).logits[0].numpy()
    return logits


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@dataclass(frozen=True)
class Variant:
    """A model that both programs run: a style with changes, then what is done to the folder."""

    style: str
    changes: dict[str, Any]
    then: Callable[[Path], Path] = lambda folder: folder
    mla: str = "split"


def _silent(folder: Path) -> Path:
    """Take out of config.json what llama.cpp's converter needs and transformers does not."""
    return edit_config(folder, lambda config: [config.pop(k, None) for k in ("scoring_func", "topk_method")])


VARIANTS = {
    "v3": Variant("v3", {}),
    "v3 sharded": Variant("v3", {}, shard),
    "v3 without scoring_func": Variant("v3", {}, _silent),
    "v3 with all groups allowed": Variant("v3", {"topk_group": 4}),
    "v3 with one group": Variant("v3", {"n_group": 1, "topk_group": 1}),
    "v3 unnormalised": Variant("v3", {"norm_topk_prob": False}),
    "v3 with YaRN": Variant(
        "v3",
        {"max_position_embeddings": 2560,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}},
        to_older_spelling,
    ),
    "v3 without q_lora": Variant(
        "v3", {"q_lora_rank": None, "num_hidden_layers": 26, "hidden_size": 64, "n_routed_experts": 4,
               "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    ),
    "v3 as plain attention": Variant("v3", {}, mla="none"),
    "v2": Variant("v2", {}),
    "v2 in the older spelling": Variant("v2", {}, to_older_spelling),
    "v2 without scoring_func": Variant("v2", {}, _silent),
    "v2 greedy in spite of groups": Variant("v2", {"n_group": 4, "topk_group": 2}),
    "v2 normalised in vain": Variant("v2", {"norm_topk_prob": True}),
    "v2 as plain attention": Variant("v2", {}, mla="none"),
    "v2-lite": Variant("v2-lite", {}),
    "v2 tied": Variant("v2", {"tie_word_embeddings": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    folder = transformers_checkpoint(tmp_path / "hf", variant.style, **variant.changes)
    expected = transformers_logits(folder)
    path = write_f32(variant.then(folder), tmp_path / "model.gguf", mla=variant.mla)
    with oracle.Model(path) as model:
        assert relative_error(model.logits(TOKENS, n_threads=1), expected) < 1e-5


def test_fp8_computes_what_its_decoded_weights_compute(tmp_path: Path) -> None:
    folder = to_fp8(transformers_checkpoint(tmp_path / "fp8", "v3"))
    path = write_f32(folder, tmp_path / "model.gguf")
    with Checkpoint(folder) as checkpoint:
        loader = open_weights(checkpoint)
        weights = {name: loader.weight(name) for name in loader.names()}
        decoded = {
            name: weight.read_rows(0, int(np.prod(weight.shape[:-1])))
            .reshape(weight.shape)
            .astype(np.float32)
            for name, weight in weights.items()
        }
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    plain = write_checkpoint(tmp_path / "plain", config, decoded)
    with oracle.Model(path) as model:
        assert relative_error(model.logits(TOKENS, n_threads=1), transformers_logits(plain)) < 1e-5


@pytest.mark.parametrize("mla", ["split", "none"])
def test_a_kept_mtp_layer_leaves_the_model_as_it_is(mla: Any, tmp_path: Path) -> None:
    folder = transformers_checkpoint(tmp_path / "hf", "v3")
    expected = transformers_logits(folder)
    path = write_f32(add_mtp_layer(folder), tmp_path / "model.gguf", mla=mla, mtp=True)
    assert any(name.startswith("model.layers.3.") for name in read_tensors(folder))
    with oracle.Model(path) as model:
        assert relative_error(model.logits(TOKENS, n_threads=1), expected) < 1e-5
