"""Rows that are picked, transposed and joined head by head, against whole arrays arranged by numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_tools.format.ggml_types import BF16, F16, F32, Q4_0, GGMLType
from quantize.fill.sources import FLOAT_DTYPES, HeadRows, TransposedHeads
from quantize.mla_layout.moves import Encoded, JoinedHeads
from tests.quantize.codecs import decode, encode


@dataclass(frozen=True)
class Rows:
    """A tensor in memory."""

    values: np.ndarray
    type: GGMLType
    name: str = "rows"
    by_rows: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        if self.type in FLOAT_DTYPES:
            return self.values[start:stop]
        return decode(self.type, encode(self.type, self.values[start:stop], None))

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        return encode(self.type, self.values[start:stop], None).reshape(-1)


def rows(n_rows: int, n_cols: int, type_: GGMLType) -> Rows:
    values = np.random.default_rng(n_rows).standard_normal((n_rows, n_cols))
    return Rows(values.astype(FLOAT_DTYPES.get(type_, np.float32)), type_)


heads = st.integers(1, 4)
row_types = st.sampled_from([F32, F16, BF16, Q4_0])


@settings(max_examples=60, deadline=None)
@given(st.data(), heads, st.integers(1, 5), st.integers(1, 5), row_types, row_types)
def test_any_row_range_is_that_of_the_whole(
    data: st.DataObject, n_heads: int, nope: int, value: int, type_: GGMLType, other: GGMLType
) -> None:
    """Rows along the latent and across it, cut anywhere, against whole arrays arranged by numpy."""
    kv_lora, head_rows = 32, nope + value
    kv = rows(n_heads * head_rows, kv_lora, type_)
    per_head = kv.read_rows(0, len(kv.values)).reshape(n_heads, head_rows, kv_lora)
    values = HeadRows("v", (n_heads * value, kv_lora), kv, head_rows, nope, value)
    keys = TransposedHeads("k", (n_heads * kv_lora, nope), kv, head_rows, 0, nope)

    k_b, v_b = rows(n_heads * kv_lora, nope, F32), rows(n_heads * value, kv_lora, other)
    back = TransposedHeads("k", (n_heads * nope, kv_lora), k_b, kv_lora, 0, kv_lora)
    joined = JoinedHeads("kv", (n_heads * head_rows, kv_lora), back, nope, v_b, value)
    upper = k_b.values.reshape(n_heads, kv_lora, nope).transpose(0, 2, 1)
    lower = v_b.read_rows(0, len(v_b.values)).reshape(n_heads, value, kv_lora).astype(np.float32)

    for tensor, whole in (
        (values, per_head[:, nope:].reshape(-1, kv_lora)),
        (keys, per_head[:, :nope].transpose(0, 2, 1).reshape(-1, nope)),
        (joined, np.concatenate([upper, lower], axis=1).reshape(-1, kv_lora)),
    ):
        start = data.draw(st.integers(0, len(whole) - 1))
        stop = data.draw(st.integers(start + 1, len(whole)))
        found = tensor.read_rows(start, stop)
        assert found.flags.c_contiguous
        assert found.dtype == FLOAT_DTYPES.get(tensor.type, FLOAT_DTYPES[F32])
        np.testing.assert_array_equal(found, whole[start:stop])
        if tensor.type in FLOAT_DTYPES:
            assert bytes(tensor.raw_rows(start, stop)) == whole[start:stop].tobytes()
    stored = kv.raw_rows(0, len(kv.values)).reshape(n_heads, head_rows, -1)[:, nope:]
    start = data.draw(st.integers(0, n_heads * value - 1))
    expected = stored.reshape(n_heads * value, -1)[start:].tobytes()
    assert bytes(values.raw_rows(start, n_heads * value)) == expected


def test_a_transposed_chunk_reads_only_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = rows(4 * 8, 16, F32)
    read: list[tuple[int, int]] = []
    original = Rows.read_rows

    def noted(tensor: Rows, start: int, stop: int) -> np.ndarray:
        read.append((start, stop))
        return original(tensor, start, stop)

    monkeypatch.setattr(Rows, "read_rows", noted)
    TransposedHeads("k", (4 * 16, 5), kv, 8, 0, 5).read_rows(16 + 3, 3 * 16)
    assert read == [(8, 13), (16, 21)]


def test_encoded_rows_decode_to_what_they_say() -> None:
    tensor = Encoded(rows(6, 64, F32), Q4_0)
    blocks = encode(Q4_0, tensor.tensor.read_rows(2, 6), None)
    assert bytes(tensor.raw_rows(2, 6)) == blocks.tobytes()
    np.testing.assert_array_equal(tensor.read_rows(2, 6), decode(Q4_0, blocks))
    assert (tensor.name, tensor.shape) == ("rows", (6, 64))
