"""Weights that another tensor scales: their rows, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_tools.errors import BadRequest, FormatError, ShapeError, ToolkitError, UnsupportedCheckpoint
from gguf_tools.format.ggml_types import F16, F32, NVFP4, GGMLType
from quantize.fill.scaled import refuse_scales, sides_of, with_scales

PATH = Path("model.gguf")


@dataclass(frozen=True)
class Array:
    """A tensor in memory."""

    name: str
    values: np.ndarray
    type: GGMLType = F32
    by_rows = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.values.reshape(-1, self.shape[-1])[start:stop]

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        return self.read_rows(start, stop).reshape(-1).view(np.uint8)


def tensors(**arrays: Any) -> dict[str, Any]:
    """Return tensors of block 0, by their names with "__" for a point."""
    named = {f"blk.0.{name.replace('__', '.')}": value for name, value in arrays.items()}
    return {name: Array(name, np.asarray(value, np.float32)) for name, value in named.items()}


def test_rows_of_a_matrix_and_of_a_stack() -> None:
    matrix, stack = np.ones((2, 4)), np.ones((3, 2, 4))
    found = with_scales(
        tensors(ffn_up__weight=matrix, ffn_up__scale=[2.0], ffn_up_exps__weight=stack,
                ffn_up_exps__scale=[1.0, 2.0, 3.0], attn_norm__weight=np.ones(4)),
        PATH, "llama",
    )  # fmt: skip
    assert found["blk.0.ffn_up.weight"].read_rows(0, 2).tolist() == [[2.0] * 4] * 2
    assert found["blk.0.ffn_up_exps.weight"].read_rows(1, 5)[:, 0].tolist() == [1, 2, 2, 3]
    assert found["blk.0.ffn_up_exps.weight"].raw_rows(4, 5).view(np.float32).tolist() == [1.0] * 4
    assert found["blk.0.attn_norm.weight"].read_rows(0, 1).tolist() == [[1.0] * 4]


def test_the_output_matrix_has_a_scale_as_nvfp4_alone() -> None:
    for type_, n_sides in ((NVFP4, 2), (F16, 0)):
        assert len(sides_of(Array("output.weight", np.ones((2, 4)), type_))) == n_sides


@pytest.mark.parametrize(
    ("more", "architecture", "error", "text"),
    [
        ({"ffn_up__scale": [1.0, 2.0]}, "llama", ShapeError, r"found shape \(2,\), expected \(1,\)"),
        ({"ffn_up__scale": [2.0], "ffn_up__bias": [1.0, 1.0]}, "llama", FormatError, "beside blk.0.ffn_up.b"),
        ({"ffn_up__scale": [2.0]}, "qwen2", UnsupportedCheckpoint, "of a qwen2 model and does not multiply"),
    ],
)  # fmt: skip
def test_what_llama_cpp_computes_otherwise(
    more: dict[str, Any], architecture: str, error: type[ToolkitError], text: str
) -> None:
    with pytest.raises(error, match=f"^model.gguf: .*{text}"):
        with_scales(tensors(ffn_up__weight=np.ones((2, 4)), **more), PATH, architecture)


def test_codes_are_chosen_for_weights_without_scales() -> None:
    scaled = tensors(ffn_down_exps__weight=np.ones((2, 2, 4)), ffn_down_exps__scale=[1.0, 2.0])
    with pytest.raises(BadRequest, match="1 weights are scaled by another tensor"):
        refuse_scales(PATH, scaled)
    refuse_scales(PATH, scaled, ("ffn_down_exps",))
