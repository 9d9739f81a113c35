"""Row ranges that cover a tensor in pieces of bounded size, for checks that read all of it."""

from __future__ import annotations

from collections.abc import Iterator

from gguf_tools.format.tensors import TensorInfo

CHUNK_BYTES = 16 << 20


def row_chunks(info: TensorInfo, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) over all rows: about `chunk_bytes` each, never cutting interleaved rows."""
    group = info.type.rows_interleaved
    step = max(chunk_bytes // (info.row_bytes * group), 1) * group
    for start in range(0, info.n_rows, step):
        yield start, min(start + step, info.n_rows)
