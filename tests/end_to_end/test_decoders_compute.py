"""Decoders that transformers has made: llama.cpp computes with our files what transformers computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
from gguf_tools import open_gguf
from gguf_tools.format import keys
from gguf_tools.format.loaders import LOADERS
from tests.support import oracle
from tests.support.decoder_models import CASES, decoder_model, sample_deviation

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

LIMIT = {"qwen35": 5e-5, "qwen35-ungrouped": 5e-5, "qwen35moe": 5e-5, "qwen3next": 5e-5,
         "ling3-groups": 5e-5,
         "starcoder2": 1e-3, "gemma2": 1e-3, "gemma3": 1e-3, "gemma4": 1e-3, "gemma4-experts": 1e-3,
         "gemma4-small": 1e-3, "gemma3n": 2e-2}  # fmt: skip
"""Largest difference, over the largest logit (1e-5 otherwise). Norms of what delta nets read magnify what is
rounded: transformers in float64 is as far from each of the two. llama.cpp looks GELU up in a table of F16,
and the 22 layers of gemma3n magnify that."""

IDS = np.random.RandomState(0).randint(3, 550, 60).tolist()


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gelu = torch.nn.functional.gelu
    monkeypatch.setattr(
        torch.nn.functional, "gelu", lambda x, **how: gelu(x.half().float(), **how).half().float()
    )
    monkeypatch.setattr(torch, "std", sample_deviation)
    model = decoder_model(name, tmp_path / name)
    convert.convert(tmp_path / name, tmp_path / "out.gguf", outtype="f32")
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    assert unlike_the_loader(tmp_path / "out.gguf") == []
    with oracle.Model(tmp_path / "out.gguf") as file:
        assert np.abs(file.logits(IDS) - expected).max() < LIMIT.get(name, 1e-5) * np.abs(expected).max()


def unlike_the_loader(path: Path) -> list[str]:
    """Return keys that llama.cpp's loader demands and the file lacks, or would not take as they are."""
    with open_gguf(path) as file:
        architecture = str(file.get(keys.ARCHITECTURE))
        n_layers = file.get(keys.BLOCK_COUNT.format(arch=architecture))
        wanted = {template.format(arch=architecture) for template in LOADERS[architecture].required}
        return sorted(wanted - set(file.metadata)) + [
            key
            for key, value in file.metadata.items()
            if keys.kinds_instead(key, architecture, value.type_name)
            or (isinstance(value.data, tuple) and keys.is_per_layer(key, architecture)
                and len(value.data) != n_layers)
        ]  # fmt: skip


def test_minimax_s_tokenizer_has_its_own_name(tmp_path: Path) -> None:
    decoder_model("minimax-m2", tmp_path / "m2")
    convert.convert(tmp_path / "m2", tmp_path / "out.gguf", outtype="f32")
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.get("tokenizer.ggml.pre") == "minimax-m2"
        assert file.get("minimax-m2.rope.dimension_count") == 16
        assert file.get("minimax-m2.expert_gating_func") == 2
        assert file.tensors["blk.0.attn_q_norm.weight"].shape == (128,)
        assert file.tensors["blk.0.attn_k_norm.weight"].shape == (64,)
