"""Rows that change places within heads, of any weight that can be read by rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from convert.architectures.decoder.rope import PairedRows, PairedVector, paired
from gguf_tools.format.ggml_types import F32, GGMLType

HEADS, HEAD_ROWS, COLS = 3, 8, 5


@dataclass(frozen=True)
class ArrayWeight:
    name: str
    array: np.ndarray
    type: GGMLType = F32
    stored_as: str = "F32"
    by_rows: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.array.reshape(-1, self.array.shape[-1])[start:stop]


@dataclass(frozen=True)
class Config:
    head_dim: int = HEAD_ROWS


def expected(array: np.ndarray) -> np.ndarray:
    """Row 2j + s of a head is its row s * d/2 + j."""
    out = np.empty_like(array)
    for head in range(HEADS):
        for j in range(HEAD_ROWS // 2):
            for s in range(2):
                out[head * HEAD_ROWS + 2 * j + s] = array[head * HEAD_ROWS + s * HEAD_ROWS // 2 + j]
    return out


MATRIX = np.arange(HEADS * HEAD_ROWS * COLS, dtype=np.float32).reshape(-1, COLS)


@pytest.mark.parametrize("start", range(0, 24, 3))
@pytest.mark.parametrize("count", [1, 2, 7, 8, 13, 24])
def test_every_range_of_rows(start: int, count: int) -> None:
    tensor: Any = paired("attn_q.weight", [ArrayWeight("q", MATRIX)], Config())
    assert isinstance(tensor, PairedRows)
    stop = min(24, start + count)
    wanted = expected(MATRIX)[start:stop]
    assert np.array_equal(tensor.read_rows(start, stop), wanted)
    assert tensor.raw_rows(start, stop).tobytes() == wanted.tobytes()


def test_a_bias_is_one_row() -> None:
    vector = np.arange(24, dtype=np.float32)
    tensor = paired("attn_q.bias", [ArrayWeight("q", vector)], Config())
    assert isinstance(tensor, PairedVector)
    assert np.array_equal(tensor.read_rows(0, 1), expected(vector)[None])
    assert tensor.raw_rows(0, 1).tobytes() == expected(vector).tobytes()
