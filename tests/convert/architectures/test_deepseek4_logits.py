"""DeepSeek V4: llama.cpp computes from our file what transformers computes from the checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.architectures.deepseek4 import V4Config
from tests.convert.architectures.deepseek4_weights import weights_of
from tests.convert.architectures.test_deepseek4 import CONFIG, TOKENIZER
from tests.support import oracle
from tests.support.checkpoints import Tensors, formula, load_transformers, write_checkpoint

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

# llama.cpp wants heads as wide as the published models'.
SIZES: dict[str, Any] = {"head_dim": 512, "qk_rope_head_dim": 64, "sliding_window": 128, "index_topk": 512}
TOKENS = [5 + 37 * number % 500 for number in range(160)]


def plain_tensors(config: V4Config) -> Tensors:
    """Return all weights in F32; a token's experts in the first layers are random."""
    rng, stored = np.random.default_rng(0), Tensors()
    for name, shape in weights_of(config):
        table = rng.integers(0, config.n_routed_experts, shape)
        stored[name] = table if name.endswith("tid2eid") else formula(shape, len(stored))
    return stored


@pytest.mark.slow
def test_llama_cpp_computes_what_transformers_computes(tmp_path: Path) -> None:
    import torch

    torch.set_num_threads(1)  # the model is so small that threads mostly wait for each other
    raw = {key: value for key, value in CONFIG.items() if key != "quantization_config"} | SIZES
    folder = write_checkpoint(tmp_path / "v4", raw, plain_tensors(V4Config.from_dict(raw)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    convert.convert(folder, tmp_path / "v4.gguf", outtype="f32")
    with oracle.Model(tmp_path / "v4.gguf") as model:
        found = model.logits(TOKENS)
    with torch.no_grad():
        expected = load_transformers(folder)(torch.tensor([TOKENS])).logits[0].numpy()
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-5
