"""Relatives of DeepSeek V3: llama.cpp computes from our files what transformers computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.architectures import supported
from tests.convert.f32_files import write_f32
from tests.support import oracle
from tests.support.checkpoints import STYLES, load_transformers, transformers_checkpoint

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

TOKENS = [int(n) for n in np.random.RandomState(7).randint(0, 320, 48)]
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_INDEXER = {"index_n_heads": 8, "index_head_dim": 64, "index_topk": 2048, "q_lora_rank": 56}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64,
         "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """V3's style with another architecture and model_type, and changes."""

    architecture: str
    model_type: str
    changes: dict[str, Any]


VARIANTS = {
    "moonlight": Variant("DeepseekV3ForCausalLM", "deepseek_v3",
                         {"q_lora_rank": None, "num_hidden_layers": 27, **_ONE_GROUP}),
    "gigachat3": Variant("DeepseekV3ForCausalLM", "deepseek_v3",
                         {"q_lora_rank": None, "num_hidden_layers": 26, **_ONE_GROUP}),
    "kanana-2": Variant("DeepseekV3ForCausalLM", "deepseek_v3",
                        {"q_lora_rank": None, "num_hidden_layers": 48, "vocab_size": 128256, **_ONE_GROUP}),
    "glm-4.7-flash": Variant("Glm4MoeLiteForCausalLM", "glm4_moe_lite", _ONE_GROUP | {"rms_norm_eps": 1e-6}),
    "youtu": Variant("YoutuForCausalLM", "youtu", {"n_routed_experts": None, "first_k_dense_replace": None,
                                                   "tie_word_embeddings": True}),
    "deepseek-v3.2": Variant("DeepseekV32ForCausalLM", "deepseek_v32",
                             _INDEXER | {"rope_parameters": _YARN, "max_position_embeddings": 2560}),
    "choosing": Variant("DeepseekV32ForCausalLM", "deepseek_v32", _INDEXER | {"index_topk": 16}),
    "glm-5": Variant("GlmMoeDsaForCausalLM", "glm_moe_dsa", _INDEXER | _ONE_GROUP | {"index_topk": 16}),
}  # fmt: skip


def variant_folder(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have transformers save a variant, in float32."""
    variant = VARIANTS[name]
    assert variant.architecture in supported()
    own = {"architectures": [variant.architecture], "model_type": variant.model_type}
    style = STYLES["v3"] | variant.changes | own
    style = {key: value for key, value in style.items() if value is not None or key == "q_lora_rank"}
    monkeypatch.setitem(STYLES, name, style)
    return transformers_checkpoint(folder, name, seed=1, dtype="float32")


_SLOW = ("gigachat3", "kanana-2")
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in VARIANTS]
"""Variants, of which GigaChat3 is Moonlight with one layer less, and Kanana-2 is large."""


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_computes_what_transformers_computes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    torch.set_num_threads(1)  # the models are so small that threads mostly wait for each other
    folder = variant_folder(name, tmp_path / "model", monkeypatch)
    with torch.no_grad():
        expected = load_transformers(folder)(torch.tensor([TOKENS])).logits[0].numpy()
    with oracle.Model(write_f32(folder, tmp_path / "model.gguf")) as model:
        found = model.logits(TOKENS)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) <= 1e-5
