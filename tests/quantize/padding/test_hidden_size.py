"""The hidden size padded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from gguf_tools import open_gguf
from gguf_tools.errors import BadRequest
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize import quantize
from quantize.linting import lint
from quantize.padding.counterparts import count_weights
from quantize.padding.hidden_size import HiddenSize, hidden_padding

METADATA: Mapping[str, Value] = {
    "general.architecture": Value.string("llama"),
    "llama.block_count": Value.u32(1),
    "llama.embedding_length": Value.u32(576),
    "llama.feed_forward_length": Value.u32(160),
    "llama.attention.head_count": Value.u32(9),
    "llama.attention.head_count_kv": Value.u32(3),
    "llama.attention.layer_norm_rms_epsilon": Value.f32(1e-5),
}

SHAPES: Mapping[str, tuple[int, ...]] = {
    "token_embd.weight": (20, 576),
    "output_norm.weight": (576,),
    "blk.0.attn_norm.weight": (576,),
    "blk.0.attn_q.weight": (576, 576),
    "blk.0.attn_k.weight": (192, 576),
    "blk.0.attn_v.weight": (192, 576),
    "blk.0.attn_q.bias": (576,),
    "blk.0.attn_k.bias": (192,),
    "blk.0.attn_output.weight": (576, 576),
    "blk.0.ffn_norm.weight": (576,),
    "blk.0.ffn_gate.weight": (160, 576),
    "blk.0.ffn_up.weight": (160, 576),
    "blk.0.ffn_down.weight": (576, 160),
}


def infos(**more: tuple[int, ...]) -> list[TensorInfo]:
    return [TensorInfo(name, shape, F32) for name, shape in {**SHAPES, **more}.items()]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    layout = FileLayout.of(METADATA, infos())
    random = np.random.default_rng(0)
    with GGUFWriter(path, layout) as writer:
        for info in infos():
            writer.write(layout.offset_of(info.name), random.standard_normal(info.shape, np.float32))
        writer.publish()
    return path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (HiddenSize(2880, 64, 8, 64), HiddenSize(3072, 64, 8, 64)),
        (HiddenSize(576, 9, 3, 64), HiddenSize(768, 12, 4, 64)),
        (HiddenSize(64, 4, 4, 16), HiddenSize(256, 16, 16, 16)),
        (HiddenSize(4096, 32, 8, 128), HiddenSize(4096, 32, 8, 128)),
    ],
)
def test_sizes(old: HiddenSize, new: HiddenSize) -> None:
    assert old.aligned == new


def test_tensors_and_metadata(model: Path, tmp_path: Path) -> None:
    made = quantize(model, tmp_path / "out.gguf", "F32", pad="256", pad_hidden=True)
    with open_gguf(model) as a, open_gguf(made.paths[0]) as b:
        for info in b.tensors.values():
            assert info.shape == tuple({576: 768, 192: 256, 160: 256}.get(n, n) for n in info.shape), (
                info.name
            )
            old = a.tensors[info.name]
            rows = b.read_rows(info.name, 0, info.n_rows).view(np.float32).reshape(info.shape)
            real = a.read_rows(info.name, 0, old.n_rows).view(np.float32).reshape(old.shape)
            kept = rows[tuple(slice(n) for n in old.shape)]
            factor = np.sqrt(576 / 768) if info.name.endswith("norm.weight") else 1.0
            np.testing.assert_array_equal(kept, (real * np.float64(factor)).astype(np.float32))
            assert np.count_nonzero(rows) == np.count_nonzero(kept)
        epsilon = np.float32(float(np.float32(1e-5)) * 576 / 768)
        assert b.get("llama.attention.layer_norm_rms_epsilon") == epsilon
        assert (b.get("llama.attention.key_length"), b.get("llama.attention.head_count")) == (64, 12)
        assert b.get("gguf_tools.unpadded.llama.embedding_length") == 576
        assert count_weights(b.metadata, b.tensors.values()) == sum(
            info.n_elems for info in a.tensors.values()
        )
    assert any("33.3 % more" in note and "33.3 % larger" in note for note in made.preparation.plan.notes)
    types = {
        info.type.name
        for info in quantize(made.paths[0], tmp_path / "q.gguf", "Q4_K_S").preparation.plan.infos
    }
    assert types == {"F32", "Q4_K", "Q5_K", "Q6_K"}


def test_off_can_t_take_it_back(model: Path, tmp_path: Path) -> None:
    padded = quantize(model, tmp_path / "out.gguf", "F32", pad_hidden=True).paths[0]
    with pytest.raises(BadRequest, match="scaled its norms"):
        quantize(padded, tmp_path / "back.gguf", "F32", pad="off")


REFUSED = {
    "architecture": ({"general.architecture": Value.string("gemma3")}, {}, "gemma3"),
    "norms of heads": ({}, {"blk.0.attn_q_norm.weight": (64,)}, "attn_q_norm"),
    "heads by layer": ({"llama.attention.head_count": Value.u32s([9])}, {}, "head_count"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": None}, {}, "epsilon is missing"),
    "another width": ({"llama.embedding_length": Value.u32(500)}, {}, "contradicts|heads of"),
    "another length of heads": ({"llama.attention.value_length": Value.u32(32)}, {}, "heads of"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    changed, more, message = REFUSED[case]
    metadata = {key: value for key, value in {**METADATA, **changed}.items() if value is not None}
    with pytest.raises(BadRequest, match=message):
        hidden_padding(metadata, infos(**more), "model.gguf")


def test_lint_says_what_a_padded_hidden_size_would_give(model: Path) -> None:
    (found,) = [each.text for each in lint("Q4_K_M", model).findings if each.kind == "padding"]
    assert "; pad_hidden=True: " in found
    assert found.endswith("hidden size 576 -> 768: about 33.3 % more to read and to multiply for each token,"
                          " and a cache 33.3 % larger")  # fmt: skip
