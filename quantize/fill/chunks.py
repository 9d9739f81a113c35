"""Chunks: the unit of work that fills one byte range of an output file.

A chunk is a run of whole rows of one tensor, never across two matrices of a stack and never across
two rows of importances, so one chunk has one matrix and one weight vector. It carries names and
numbers only: whoever runs it looks the arrays up, in this process or in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gguf_tools.layout import FileLayout, TensorInfo

# 4 Mi elements are 16 MiB of float32: long enough that a task's overhead vanishes, short enough that
# source, float32 and blocks of a worker stay well under 100 MiB.
CHUNK_ELEMS = 4 * 1024 * 1024


@dataclass(frozen=True)
class ChunkTask:
    """Rows `row_start` to `row_stop` of `tensor`, to be encoded and written at `offset`.

    tensor               name in the output (and in the job's sources)
    row_start, row_stop  rows counted over all matrices of the stack
    offset               absolute byte offset in the output file
    n_bytes              how many bytes the encoded rows take
    number               which chunk of the run it is
    """

    tensor: str
    row_start: int
    row_stop: int
    offset: int
    n_bytes: int
    number: int = 0

    def __str__(self) -> str:
        return f"{self.tensor} rows {self.row_start}..{self.row_stop}"


def tensor_chunks(
    info: TensorInfo,
    offset: int,
    rows_per_weights: int | None = None,
    chunk_elems: int = CHUNK_ELEMS,
    first_number: int = 0,
) -> Iterator[ChunkTask]:
    """Yield the chunks that cover `info` at absolute `offset`.

    rows_per_weights  after how many rows the next row of importances begins; None: one for all
    chunk_elems       aim at this many elements a chunk; at least one row is taken
    first_number      the number of the first of them
    """
    rows_per_matrix = info.shape[-2] if len(info.shape) > 1 else 1
    span = min(rows_per_matrix, rows_per_weights or rows_per_matrix)
    row_bytes = info.type.row_bytes(info.n_cols)
    step = max(1, chunk_elems // max(1, info.n_cols))
    # Interleaved types keep several rows in one group, which must not be torn apart.
    step = max(1, step // info.type.rows_interleaved) * info.type.rows_interleaved
    number = first_number
    for matrix_start in range(0, info.n_rows, span):
        matrix_stop = min(matrix_start + span, info.n_rows)
        for start in range(matrix_start, matrix_stop, step):
            stop = min(start + step, matrix_stop)
            yield ChunkTask(
                info.name, start, stop, offset + start * row_bytes, (stop - start) * row_bytes, number
            )
            number += 1


def layout_chunks(
    layout: FileLayout,
    rows_per_weights: dict[str, int],
    chunk_elems: int = CHUNK_ELEMS,
    first_number: int = 0,
) -> Iterator[ChunkTask]:
    """Yield the chunks of every tensor of `layout`, in file order, numbered from `first_number`.

    rows_per_weights  per tensor name, for tensors with more than one row of importances
    """
    number = first_number
    for info, offset in zip(layout.tensors, layout.offsets, strict=True):
        for task in tensor_chunks(info, offset, rows_per_weights.get(info.name), chunk_elems, number):
            yield task
            number += 1
