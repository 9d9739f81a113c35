from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_tools.format.ggml_types import F32, Q4_K, Q8_0
from gguf_tools.format.shards import TensorInfo
from quantize.fill.chunks import TensorChunks

TYPES = [F32, Q8_0, Q4_K]


@given(
    n_mats=st.integers(1, 5),
    n_rows=st.integers(1, 40),
    blocks=st.integers(1, 3),
    chunk_elems=st.integers(1, 20_000),
    type_=st.sampled_from(TYPES),
)
def test_chunks_cover_every_byte_once_and_stay_inside_a_matrix(
    n_mats: int, n_rows: int, blocks: int, chunk_elems: int, type_: object
) -> None:
    info = TensorInfo("t", (n_mats, n_rows, blocks * 256), type_)
    chunks = list(TensorChunks.of(info, 4096, chunk_elems=chunk_elems))
    expected_row, expected_offset = 0, 4096
    for chunk in chunks:
        assert (chunk.rows.start, chunk.offset) == (expected_row, expected_offset)
        assert chunk.rows.start // n_rows == (chunk.rows.stop - 1) // n_rows
        expected_row, expected_offset = chunk.rows.stop, chunk.offset + chunk.n_bytes
    assert expected_row == n_mats * n_rows
    assert expected_offset == 4096 + info.n_bytes


@pytest.mark.parametrize("rows_per_weights", [4, 8, 16])
def test_chunks_stay_inside_a_row_of_importances(rows_per_weights: int) -> None:
    """The 2-D attn_k_b: one matrix, but every kv_lora_rank rows belong to another head."""
    info = TensorInfo("blk.0.attn_k_b.weight", (32, 128), Q8_0)
    for chunk in TensorChunks.of(info, rows_per_weights=rows_per_weights):
        assert chunk.rows.start // rows_per_weights == (chunk.rows.stop - 1) // rows_per_weights


def test_a_vector_is_one_row() -> None:
    (chunk,) = TensorChunks.of(TensorInfo("output_norm.weight", (256,), F32), 64)
    assert (chunk.rows.start, chunk.rows.stop, chunk.offset, chunk.n_bytes) == (0, 1, 64, 1024)


def test_rows_longer_than_a_chunk_go_one_by_one() -> None:
    chunks = list(TensorChunks.of(TensorInfo("t", (3, 512), F32), chunk_elems=100))
    assert [(c.rows.start, c.rows.stop) for c in chunks] == [(0, 1), (1, 2), (2, 3)]
