"""Activations rounded as llama.cpp's CPU kernels round them, against those kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import convert
import quantize
from gguf_tools.errors import BadRequest
from gguf_tools.format import ggml_types
from gguf_tools.format.ggml_types import F32
from quantize.plan.decide import PlanOptions
from quantize.plan.overrides import parse_override
from tests.support import oracle
from tests.support.decoder_models import decoder_model
from tests.support.trained_model import GOLDEN, trained_model

torch = pytest.importorskip("torch")

from torch.nn.functional import linear  # noqa: E402

from imatrix.forward.layers.attention.indexer import hadamard  # noqa: E402
from imatrix.forward.layers.llama_rounding import (  # noqa: E402
    ROUNDINGS,
    RoundingMatrix,
    round_bf16,
    round_f16,
    round_q8_0,
    round_q8_k,
    rounding_of,
)
from imatrix.forward.open import open_model  # noqa: E402
from imatrix.forward.options import ForwardOptions  # noqa: E402
from tests.imatrix.forward.deepseek4_models import LIKE_LLAMA, v4_model  # noqa: E402
from tests.imatrix.forward.small_models import run_all_layers  # noqa: E402

needs_oracle = pytest.mark.skipif(not oracle.available(), reason="the oracle needs the xllamacpp wheel")

ACTIVATION_TYPES = {
    ggml_types.F32: None,
    ggml_types.F16: round_f16,
    ggml_types.BF16: round_bf16,
    ggml_types.Q8_0: round_q8_0,
    ggml_types.Q8_1: round_q8_0,
    ggml_types.Q8_K: round_q8_k,
}


def some_rows() -> np.ndarray:
    """Return rows of different sizes, with outliers, zeros, and ties of the largest value."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((64, 512)).astype(np.float32)
    rows *= np.exp(rng.standard_normal((64, 1))).astype(np.float32)
    rows[3] = 0
    rows[4, :256] = 0
    rows[5, 7], rows[5, 9] = 50, -50
    rows[6, 7], rows[6, 9] = -50, 50
    rows[7] *= 1e-6
    return rows


@needs_oracle
@pytest.mark.parametrize("type_", [type_ for type_ in ACTIVATION_TYPES if type_.name != "Q8_1"], ids=str)
def test_activations_are_rounded_to_the_last_bit(type_: ggml_types.GGMLType) -> None:
    rows = some_rows()
    rounding = ACTIVATION_TYPES[type_]
    found = rows if rounding is None else rounding(torch.from_numpy(rows)).numpy()
    np.testing.assert_array_equal(found, oracle.round_activations(type_.id, rows))


@needs_oracle
@pytest.mark.parametrize("name", ROUNDINGS)
def test_each_type_asks_for_what_ggml_asks_for(name: str) -> None:
    type_ = ggml_types.by_name(name)
    wanted = ggml_types.by_id(oracle.activation_type(type_.id))
    assert rounding_of(type_) is ACTIVATION_TYPES[wanted]


def test_a_matrix_rounds_what_it_multiplies() -> None:
    rng = np.random.default_rng(2)
    weight = torch.from_numpy(rng.standard_normal((6, 10, 64)).astype(np.float32))
    x = torch.from_numpy(rng.standard_normal((5, 64)).astype(np.float32))
    matrix = RoundingMatrix.of(weight.clone(), round_q8_0)
    flat = matrix[1:4].flatten(0, 1)
    expected = linear(round_q8_0(x), weight[1:4].flatten(0, 1))
    assert type(linear(x, flat)) is torch.Tensor
    assert torch.equal(linear(x, flat), expected)
    stacked = x.expand(6, -1, -1)
    assert torch.equal(
        torch.bmm(stacked, matrix.transpose(1, 2)), torch.bmm(round_q8_0(stacked), weight.transpose(1, 2))
    )


def test_what_can_not_be_imitated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"like llama\.cpp: llama\.cpp has no kernel for IQ2_K$"):
        rounding_of(ggml_types.IQ2_K)
    options = ForwardOptions(like="llama.cpp")
    with open_model(trained_model(tmp_path)) as source:
        assert source.loader_for(options).llama_rounding
        with pytest.raises(BadRequest, match=r"like llama\.cpp computes in float32, not in bfloat16"):
            source.loader_for(replace(options, dtype="bfloat16"))


LATENT_CASES = [
    ("split", None), ("split", "attn_k_b"), ("split", "attn_v_b"), ("none", None), ("none", "attn_kv_b"),
]  # fmt: skip


@needs_oracle
@pytest.mark.parametrize(("layout", "rounded"), LATENT_CASES)
def test_latent_attention_rounds_as_llama_cpp_does(
    layout: Literal["split", "none"], rounded: str | None, tmp_path: Path
) -> None:
    """One kind of matrix is Q8_0: with more, a last bit that differs soon changes codes everywhere."""
    path = tmp_path / "f32.gguf"
    convert.convert(trained_model(tmp_path), path, outtype="f32", mla=layout)
    if rounded is not None:
        types = PlanOptions(
            (parse_override(f"{rounded}=Q8_0"), parse_override("blk=F32")),
            output_type=F32,
            embedding_type=F32,
        )
        quantize.quantize(path, tmp_path / "q.gguf", "Q8_0", types)
        path = tmp_path / "q.gguf"
    assert_rounds_as_llama_cpp(path)


@needs_oracle
def test_keys_and_values_are_cached_as_llama_cpp_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    decoder_model("qwen3", tmp_path / "qwen3")
    convert.convert(tmp_path / "qwen3", tmp_path / "f32.gguf", outtype="f32")
    assert_rounds_as_llama_cpp(tmp_path / "f32.gguf")


@needs_oracle
def test_an_indexer_chooses_as_llama_cpp_s_does(tmp_path: Path) -> None:
    """Of 80 positions 16 are chosen; one other choice shows in all logits after it."""
    convert.convert(GOLDEN / "arch" / "models" / "deepseek-v3.2", tmp_path / "f32.gguf", outtype="f32")
    assert_rounds_as_llama_cpp(tmp_path / "f32.gguf")


@needs_oracle
def test_an_indexer_chooses_blocks_as_llama_cpp_s_does(tmp_path: Path) -> None:
    """Of 20 blocks, each token attends to three, for each head of keys to others."""
    pytest.importorskip("transformers")
    decoder_model("minimax-m3-chosen", tmp_path / "hf")
    convert.convert(tmp_path / "hf", tmp_path / "f32.gguf", outtype="f32")
    assert_rounds_as_llama_cpp(tmp_path / "f32.gguf")


@needs_oracle
def test_an_indexer_chooses_windows_as_llama_cpp_s_does(tmp_path: Path) -> None:
    folder = v4_model(tmp_path / "hf", **LIKE_LLAMA | {"index_topk": 8, "index_n_heads": 64})
    convert.convert(folder, tmp_path / "f32.gguf", outtype="f32")
    assert_rounds_as_llama_cpp(tmp_path / "f32.gguf")


def test_hadamard_matrices_are_orthogonal() -> None:
    for n_cols, n_rows in ((64, 64), (128, 128), (192, 64), (24, 8)):
        turn = hadamard(n_cols)
        assert turn.shape == (n_rows, n_rows)
        assert torch.equal(turn.abs(), torch.full_like(turn, n_rows**-0.5))
        torch.testing.assert_close(turn @ turn.T, torch.eye(n_rows))


def assert_rounds_as_llama_cpp(path: Path) -> None:
    """Our logits are llama.cpp's, with flash attention and a cache of F16, and not so without rounding."""
    # Flash attention takes 64 queries or more in tiles, and fewer otherwise.
    tokens = np.random.default_rng(5).integers(3, 500, 80)
    with oracle.Model(path) as model:
        expected = model.logits(tokens.tolist(), as_shipped=True)

    def error(*, rounds: bool) -> float:
        with open_model(path) as source:
            logits, _ = run_all_layers(source, tokens[None], rounds=rounds)
        return float(np.median(np.abs(logits[0] - expected).max(-1)) / np.abs(expected).max())

    assert error(rounds=True) < error(rounds=False) / 5
