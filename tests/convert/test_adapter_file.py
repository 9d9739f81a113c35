"""An adapter in a file of its own: llama.cpp adds it to the base's file, and computes the merged model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
from convert.adapter_file import convert_adapter
from gguf_tools import open_gguf
from gguf_tools.errors import OutputError, UnsupportedCheckpoint
from tests.support import oracle
from tests.support.adapters import numbers, pair_of, write_adapter
from tests.support.checkpoints import micro_checkpoint, read_tensors
from tests.support.decoder_models import decoder_model

pytest.importorskip("torch")
needs_llama = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

LAYER = "model.layers.1"
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
         "mlp.up_proj", "mlp.down_proj")  # fmt: skip
IDS = [1, 5, 17, 300, 41, 8, 222, 90, 3, 11]


@needs_llama
@pytest.mark.parametrize(("name", "experts"), [("llama-biases", 0), ("qwen3moe", 5)])
def test_llama_cpp_computes_the_merged_model(name: str, experts: int, tmp_path: Path) -> None:
    base = tmp_path / "base"
    decoder_model(name, base)
    dense = [f"{LAYER}.{part}" for part in PARTS[: 4 if experts else 7]]
    modules = dense + [
        f"{LAYER}.mlp.experts.{e}.{p}" for e in range(experts) for p in ("up_proj", "down_proj")
    ]
    tensors = {key: value for module in [*modules, "lm_head"] for key, value in pair_of(base, module).items()}
    tensors["model.embed_tokens.lora_embedding_A"] = numbers(4, 576)
    tensors["model.embed_tokens.lora_embedding_B"] = numbers(64, 4)
    adapter = write_adapter(tmp_path / "adapter", tensors, use_rslora=True, alpha_pattern={"lm_head": 3})
    convert.convert(base, tmp_path / "base.gguf", "f32")
    convert.convert(base, tmp_path / "merged.gguf", "f32", lora=adapter)
    path = convert_adapter(adapter, base, tmp_path)
    assert path.name == "adapter-F32.gguf"
    with oracle.Model(tmp_path / "merged.gguf") as model:
        expected = model.logits(IDS, n_threads=1)
    with oracle.Model(tmp_path / "base.gguf") as model:
        found = model.logits(IDS, n_threads=1, adapter=path)
        without = model.logits(IDS, n_threads=1)
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() < 1e-5 * scale
    assert np.abs(without - expected).max() > 1e-2 * scale


def test_factors_are_stored_as_they_are(tmp_path: Path) -> None:
    base = tmp_path / "base"
    decoder_model("llama-biases", base)
    tensors = pair_of(base, f"{LAYER}.mlp.down_proj")
    adapter = write_adapter(tmp_path / "adapter", tensors)
    with open_gguf(convert_adapter(adapter, base, tmp_path / "a.gguf")) as file:
        stored = {name: np.frombuffer(file.raw(name), np.float32) for name in file.tensors}
        assert (file.get("general.type"), file.get("adapter.type")) == ("adapter", "lora")
        assert file.get("adapter.lora.alpha") == 6
    a, b = tensors.values()
    np.testing.assert_array_equal(stored["blk.1.ffn_down.weight.lora_a"], a.reshape(-1))
    np.testing.assert_array_equal(stored["blk.1.ffn_down.weight.lora_b"], b.reshape(-1))
    with pytest.raises(OutputError, match="exists already"):
        convert_adapter(adapter, base, tmp_path / "a.gguf")


@pytest.mark.parametrize("case", ["dora", "anew", "latent"])
def test_what_llama_cpp_can_not_add_is_refused(case: str, tmp_path: Path) -> None:
    base = micro_checkpoint(tmp_path / "base", "v2", num_hidden_layers=2)
    module = f"{LAYER}.self_attn.{'kv_b_proj' if case == 'latent' else 'o_proj'}"
    tensors = pair_of(base, module)
    if case == "dora":
        tensors[f"{module}.lora_magnitude_vector"] = np.ones(
            len(tensors[f"{module}.lora_B.weight"]), np.float32
        )
    if case == "anew":
        tensors["model.norm.weight"] = np.ones(read_tensors(base)["model.norm.weight"].shape, np.float32)
    adapter = write_adapter(tmp_path / "adapter", tensors, use_dora=case == "dora")
    with pytest.raises(UnsupportedCheckpoint, match="can't be in a file of the adapter alone"):
        convert_adapter(adapter, base, tmp_path)
