"""DeepSeek V4 against transformers and llama.cpp: logits, importances, gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.architectures.deepseek4 import ARCHITECTURE, V4Config
from gguf_tools import open_gguf
from gguf_tools.errors import FormatError, UnsupportedCheckpoint
from imatrix.forward.open import open_model
from tests.imatrix.forward.deepseek4_models import CONFIG, LIKE_LLAMA, v4_model
from tests.imatrix.forward.small_models import run_all_layers
from tests.support import oracle
from tests.support.checkpoints import edit_tensors, load_transformers

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import imatrix.forward.layers.attention.compressed as compressed  # noqa: E402
import imatrix.forward.layers.attention.compressed as compressor  # noqa: E402
from tests.imatrix.forward.test_differentiate import WeightGradients, differentiate, directions  # noqa: E402
from tests.support.oracle.activations import observed  # noqa: E402

TOKENS = np.random.default_rng(0).integers(3, 500, 270)
"""Ids of a chunk with two windows of 128 positions, and 67 of 4."""

CHUNKS = TOKENS.reshape(2, -1)
"""The same as two chunks, with a window of 128 positions each."""

VARIANTS: dict[str, dict[str, Any]] = {
    "chooses": {},
    "sees all windows": {"index_topk": 512, "swiglu_limit": 10.0},
    "plain rotation, more rounds": {
        "rope_scaling": None, "hc_sinkhorn_iters": 20, "compress_ratios": [128, 4, 4],
    },
    "without tables": {"num_hash_layers": 0, "compress_ratios": [0, 0, 4]},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return v4_model(tmp_path_factory.mktemp("v4") / "model")


def as_file(folder: Path, path: Path) -> Path:
    convert.convert(folder, path, outtype="f32")
    return path


def logits_of(path: Path, tokens: np.ndarray = TOKENS, **options: Any) -> np.ndarray:
    with open_model(path) as source:
        logits, _ = run_all_layers(source, tokens[None], **options)
    found: np.ndarray = logits[0]
    return found


def of_transformers(folder: Path, tokens: np.ndarray = TOKENS) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = load_transformers(folder)(torch.from_numpy(tokens[None])).logits[0].numpy()
    return logits


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = v4_model(tmp_path / "model", **VARIANTS[name])
    found = logits_of(model)
    assert relative_error(found, of_transformers(model)) < 1e-5
    np.testing.assert_array_equal(logits_of(as_file(model, tmp_path / "model.gguf")), found)


def test_every_part_shows_in_the_logits(folder: Path, tmp_path: Path) -> None:
    """Otherwise the tests above would say little."""
    expected = logits_of(folder)
    for name, changes in {
        "choice": {"index_topk": 512}, "limit": {"swiglu_limit": 100.0}, "window": {"sliding_window": 16},
        "rounds": {"hc_sinkhorn_iters": 1}, "windows": {"compress_rope_theta": 10000},
    }.items():  # fmt: skip
        assert relative_error(logits_of(v4_model(tmp_path / name, **changes)), expected) > 1e-3, name


@pytest.mark.slow
def test_chunks_shorter_than_a_window(folder: Path) -> None:
    for n_tokens in (1, 3, 4, 9):
        tokens = TOKENS[:n_tokens]
        assert relative_error(logits_of(folder, tokens), of_transformers(folder, tokens)) < 1e-5


def test_queries_in_blocks_see_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits_of(folder)
    for module in (compressed, compressor):
        monkeypatch.setattr(module, "QUERY_BLOCK", 50)
    monkeypatch.setattr(compressed, "SCORES_BYTES", 1)
    assert relative_error(logits_of(folder), expected) < 1e-6


def test_bfloat16_comes_near(folder: Path) -> None:
    assert relative_error(logits_of(folder, dtype=torch.bfloat16), logits_of(folder)) < 0.2


def test_keys_say_what_the_configuration_does(folder: Path, tmp_path: Path) -> None:
    with open_gguf(as_file(folder, tmp_path / "model.gguf")) as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
        found = ARCHITECTURE.read_file(file.metadata, shapes, tmp_path / "model.gguf")
    expected = V4Config.from_dict(CONFIG)
    assert replace(found, rope=expected.rope, hc_eps=1e-6, rms_norm_eps=1e-6) == expected
    assert found.rope.yarn == replace(expected.rope.yarn, mscale=1.0, attention_factor=1.0)
    assert (found.rope.factor, found.rope.theta) == (4, 10000)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (b"deepseek4.expert_gating_func", 9, "expert_gating_func is 9, expected 1 .softmax"),
        (b"deepseek4.attention.output_group_count", 3, "4 heads of 32 columns in 3 groups"),
    ],
)
def test_keys_that_mean_nothing(key: bytes, value: int, message: str, folder: Path, tmp_path: Path) -> None:
    data = bytearray(as_file(folder, tmp_path / "model.gguf").read_bytes())
    data[data.index(key) + len(key) + 4] = value
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises((FormatError, UnsupportedCheckpoint), match=message):
        open_model(tmp_path / "bad.gguf")


def test_a_table_of_experts_that_are_not_there(tmp_path: Path) -> None:
    model = v4_model(tmp_path / "model")
    name = "layers.0.ffn.gate.tid2eid"
    edit_tensors(model, lambda tensors: tensors.update({name: np.maximum(tensors[name], 1) + 1}))
    message = r"blk\.0\.ffn_gate_tid2eid\.weight: has numbers from 2 to 4, expected 0 to 3"
    with pytest.raises(FormatError, match=message):
        logits_of(model)


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
def test_importances_equal_llama_imatrix(tmp_path: Path) -> None:
    model = v4_model(tmp_path / "model", **LIKE_LLAMA)
    path, tokens = as_file(model, tmp_path / "model.gguf"), TOKENS[:150]
    with open_model(path) as source:
        logits, found = run_all_layers(source, tokens[None])
    with oracle.Model(path) as llama:
        assert relative_error(logits[0], llama.logits(tokens.tolist())) < 1e-5
        expected = observed(llama, tokens.tolist())
    assert found.keys() == {name for name in expected if name.startswith("blk.")}
    for name, sums in found.items():
        squares, counts = expected[name].squares, expected[name].counts
        assert (np.broadcast_to(sums.counts, counts.shape) == counts).all(), name
        np.testing.assert_allclose(sums.squares, squares, rtol=1e-3, atol=1e-6 * squares.max(), err_msg=name)


def expected_gradients(folder: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the gradients at the embeddings and at some weights, by plain autograd."""
    model = load_transformers(folder).requires_grad_()
    embeddings: list[Any] = []
    strands: list[Any] = []

    def begin(_module: Any, _inputs: Any, output: Any) -> Any:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[0]

    model.model.embed_tokens.register_forward_hook(begin)
    model.model.layers[-1].register_forward_hook(lambda _m, _i, output: strands.append(output))
    model(torch.from_numpy(CHUNKS))
    (last,) = strands
    last.backward(directions(CHUNKS.size, last[0, 0].numel()).view_as(last))
    weights = {}
    for number, layer in enumerate(model.model.layers):
        attention, block = layer.self_attn, layer.mlp
        gate, up = block.experts.gate_up_proj.grad.chunk(2, 1)
        of_layer = {
            "hc_attn_fn": layer.attn_hc.fn, "hc_ffn_fn": layer.ffn_hc.fn,
            "attn_q_a": attention.q_a_proj.weight, "attn_q_b": attention.q_b_proj.weight,
            "attn_kv": attention.kv_proj.weight, "attn_output_a": attention.o_a_proj.weight,
            "attn_output_b": attention.o_b_proj.weight, "ffn_down_exps": block.experts.down_proj,
            "ffn_gate_shexp": block.shared_experts.gate_proj.weight,
        }  # fmt: skip
        if attention.compressor is not None:
            of_layer["attn_compressor_kv"] = attention.compressor.kv_proj.weight
            of_layer["attn_compressor_gate"] = attention.compressor.gate_proj.weight
        found = {name: weight.grad for name, weight in of_layer.items()}
        for name, gradient in {**found, "ffn_gate_exps": gate, "ffn_up_exps": up}.items():
            weights[f"blk.{number}.{name}.weight"] = gradient.flatten(0, -2).numpy()
    return embeddings[0].grad.flatten(0, 1).numpy(), weights


def test_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    model = v4_model(tmp_path / "model")
    at_embeddings, weights = expected_gradients(model)
    observer = WeightGradients()
    with open_model(model) as source:
        found = differentiate(source, observer, chunks=CHUNKS)
    assert relative_error(found, at_embeddings) < 1e-5
    for name, expected in weights.items():
        assert relative_error(observer.of(name), expected) < 1e-5, name
