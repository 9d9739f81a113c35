"""What a plan promises, the run does: the quantizer's front from metadata to bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import quantize
from gguf_tools import open_gguf
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.ggml_types import F32, by_name
from gguf_tools.format.shards import FileLayout, GGUFSet
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize.importances.entries import Importance
from tests.quantize.codecs import encode

HEADS = "deepseek2.attention.head_count"
KEYS = TensorInfo("blk.0.attn_k_b.weight", (8 * 16, 32), F32)
"""A 2-D attn_k_b: sixteen rows for each of eight heads."""


def write_model(path: Path, n_heads: int) -> np.ndarray:
    """Write a model of nothing but KEYS whose metadata give it `n_heads` heads; return its rows."""
    rows = np.random.default_rng(0).standard_normal(KEYS.shape, np.float32)
    metadata = {
        "general.architecture": Value.string("deepseek2"),
        "deepseek2.block_count": Value.u32(1),
        HEADS: Value.u32(n_heads),
    }
    layout = FileLayout.of(metadata, [KEYS])
    with GGUFWriter(path, layout) as writer:
        writer.write(layout.offset_of(KEYS.name), rows)
        writer.publish()
    return rows


def test_importances_are_those_of_the_plan_also_where_metadata_are_overridden(tmp_path: Path) -> None:
    """The matrix has data for eight heads, the file says four, and the user knows better."""
    rows = write_model(tmp_path / "in.gguf", n_heads=4)
    values = np.random.default_rng(1).uniform(0.01, 5, (8, 32)).astype(np.float32)
    data = Importance(values, np.ones(8, np.float32))
    result = quantize.quantize(
        tmp_path / "in.gguf",
        tmp_path / "out.gguf",
        "Q4_0",
        importances={KEYS.name: data},
        kv_overrides=[(HEADS, Value.u32(8))],
    )
    (planned,) = result.preparation.plan.tensors
    assert planned.weighting == "one row per head"
    heads = zip(rows.reshape(8, 16, 32), values, strict=True)
    expected = b"".join(encode("Q4_0", head, weights).tobytes() for head, weights in heads)
    with open_gguf(tmp_path / "out.gguf") as file:
        assert bytes(file.raw(KEYS.name)) == expected


def copy_of(path: Path, tensors: Sequence[TensorInfo]) -> GGUFSet:
    """Write a model of zeros without a file type, copy it with COPY, and open the copy."""
    metadata = {"general.architecture": Value.string("llama"), "llama.block_count": Value.u32(1)}
    layout = FileLayout.of(metadata, tensors)
    (path / "in.gguf").write_bytes(layout.header + bytes(layout.total_bytes - len(layout.header)))
    return open_gguf(quantize.quantize(path / "in.gguf", path / "out.gguf", "COPY").paths[0])


@pytest.mark.parametrize(
    ("types", "number"),
    [("F32 F32 BF16", 0), ("F32 Q8_0 Q8_0", 7), ("Q4_K Q4_K F16", 15), ("NVFP4", 39), ("MXFP4", 0),
     ("BF16 F16", 32), ("BF16 F16 F16 BF16", 1), ("IQ5_K", 141)],
)  # fmt: skip
def test_a_copy_without_a_file_type_gets_a_guessed_one(tmp_path: Path, types: str, number: int) -> None:
    """The type that is first to have the most tensors, and the mark of a guess."""
    tensors = [TensorInfo(f"{n}.weight", (2, 256), by_name(name)) for n, name in enumerate(types.split())]
    with copy_of(tmp_path, tensors) as file:
        assert file.metadata["general.file_type"] == Value.u32(1024 | number)


@pytest.mark.parametrize(
    ("shape", "stored"),
    [((1, 64), (64,)), ((1, 1, 64), (64,)), ((1, 3, 64), (3, 64)), ((3, 1, 64), (3, 1, 64)), ((1,), (1,))],
)
def test_leading_dimensions_of_1_are_not_written(
    tmp_path: Path, shape: tuple[int, ...], stored: tuple[int, ...]
) -> None:
    with copy_of(tmp_path, [TensorInfo("a.weight", shape, F32)]) as file:
        assert file.tensors["a.weight"].shape == stored
