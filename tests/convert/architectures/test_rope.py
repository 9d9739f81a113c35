"""RoPE as config.json describes it, and Llama 3's tensor of it.

Rows that change places within heads, of any weight that can be read by rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.rope import (
    PairedRows,
    PairedVector,
    RopeConfig,
    llama3_divisors,
    paired,
    read_rope,
)
from gguf_tools.errors import BadConfig, UnsupportedCheckpoint
from gguf_tools.format.ggml_types import F32, GGMLType


def read(**config: Any) -> RopeConfig:
    return read_rope(ConfigReader(config, "config.json"), 4096)


def test_both_spellings_say_the_same() -> None:
    older = read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2})
    newer = read(rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 5e5})
    assert older == newer == RopeConfig(5e5, "linear", factor=2.0, original_context=4096)


@pytest.mark.parametrize("kind", ["default", "none", None])
def test_plain_rope_has_nothing_but_its_base(kind: str | None) -> None:
    assert read(rope_scaling={"rope_type": kind, "factor": 3.0}) == RopeConfig(10000.0)


def test_attn_factor_is_written_and_not_computed_with() -> None:
    rope = read(rope_scaling={"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.9})
    assert (rope.written_factor, rope.attention_factor) == (0.9, None)


def test_a_type_that_nobody_knows() -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"config\.json: rope_scaling: RoPE of type 'spiral'"):
        read(rope_scaling={"rope_type": "spiral", "factor": 2.0})


def test_yarn_needs_a_factor() -> None:
    with pytest.raises(BadConfig, match=r"no rope_scaling\.factor, expected a positive number"):
        read(rope_scaling={"rope_type": "yarn"})


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("n_cols", [64, 80, 128])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_divisors_are_the_formula(theta: float, n_cols: int, factor: float) -> None:
    """One pair at a time, in float64."""
    rope = RopeConfig(theta, "llama3", factor=factor, original_context=8192)
    expected = []
    for pair in range(n_cols // 2):
        wave = 2 * math.pi * theta ** (2 * pair / n_cols)
        share = (8192 / wave - 1) / 3
        blended = 1 / ((1 - share) / factor + share)
        expected.append(1 if wave < 8192 / 4 else factor if wave > 8192 else blended)
    divisors = llama3_divisors(rope, n_cols)
    assert divisors.dtype == np.float32
    assert np.allclose(divisors, expected, rtol=2e-6)
    assert {1.0, factor} <= set(divisors.tolist())


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
