"""Chunks: the units of work that fill the byte ranges of output files.

A chunk is a run of whole rows of one tensor. It never crosses from one matrix of a stack into the next, nor
from one row of importances, so one chunk has one matrix and one weight vector. It holds names and numbers
only: whoever runs it looks the arrays up, in this process or in another.

The chunks of a run are numbered through all of its outputs, and the journal knows them by these numbers. A
`ChunkTable` is the only place that turns numbers into chunks and back. A chunk's rows have a digest, which
resuming and provenance share.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from gguf_tools.format.shards import FileLayout, TensorInfo

CHUNK_ELEMS = 4 * 1024 * 1024
"""Elements of a chunk, about: 16 MiB of float32. Long enough that a task's overhead vanishes, short enough
that source, float32 and blocks of a worker stay well under 100 MiB."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `start` to `stop` of a tensor, counted over all matrices of its stack."""

    tensor: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.tensor} rows {self.start}..{self.stop}"

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """Rows to be encoded, and the place of their bytes.

    rows    of a tensor, by its name in the output (and in the sources)
    output  which output file of the run
    offset  absolute byte offset in that file
    n_bytes of the encoded rows
    number  which chunk of the run it is
    """

    rows: RowRange
    output: int
    offset: int
    n_bytes: int
    number: int

    def __str__(self) -> str:
        return str(self.rows)


def rows_alike(info: TensorInfo, rows_per_weights: int | None = None) -> int:
    """Count the rows that share a matrix and a row of importances.

    rows_per_weights  after how many rows the next row of importances begins; None: one for all
    """
    rows_per_matrix = info.shape[-2] if len(info.shape) > 1 else 1
    return max(1, min(rows_per_matrix, rows_per_weights or rows_per_matrix))


@dataclass(frozen=True)
class TensorChunks:
    """The chunks of one tensor of an output.

    output  which output file of the run
    offset  absolute byte offset of the tensor's data in it
    first   the number of the first chunk
    alike   how many rows share a matrix and a row of importances
    step    how many rows a chunk has; the last one of rows that are alike may have fewer
    """

    info: TensorInfo
    output: int
    offset: int
    first: int
    alike: int
    step: int

    @classmethod
    def of(
        cls,
        info: TensorInfo,
        offset: int = 0,
        *,
        rows_per_weights: int | None = None,
        chunk_elems: int = CHUNK_ELEMS,
        output: int = 0,
        first: int = 0,
    ) -> TensorChunks:
        """Cut `info` into chunks of about `chunk_elems` elements, at least one row each.

        rows_per_weights  see `rows_alike`
        """
        step = max(1, chunk_elems // max(1, info.n_cols))
        # Interleaved types keep several rows in one group, which must not be torn apart.
        step = max(1, step // info.type.rows_interleaved) * info.type.rows_interleaved
        return cls(info, output, offset, first, rows_alike(info, rows_per_weights), step)

    def __len__(self) -> int:
        whole, rest = divmod(self.info.n_rows, self.alike)
        return whole * self._per_run + -(-rest // self.step)

    @property
    def _per_run(self) -> int:
        """Chunks of rows that are alike."""
        return -(-self.alike // self.step)

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + len(self))

    def task(self, number: int) -> ChunkTask:
        """The chunk with a number of `numbers`."""
        run, index = divmod(number - self.first, self._per_run)
        start = run * self.alike + index * self.step
        stop = min(start + self.step, (run + 1) * self.alike, self.info.n_rows)
        row_bytes = self.info.row_bytes
        return ChunkTask(
            RowRange(self.info.name, start, stop),
            self.output,
            self.offset + start * row_bytes,
            (stop - start) * row_bytes,
            number,
        )

    def __iter__(self) -> Iterator[ChunkTask]:
        return map(self.task, self.numbers)


@dataclass(frozen=True)
class ChunkTable:
    """All chunks of a run: what is to be done.

    tensors  the chunks of each tensor of all outputs, in file order
    outputs  the numbers of the chunks of each output
    """

    tensors: Mapping[str, TensorChunks]
    outputs: tuple[range, ...]
    _starts: tuple[int, ...] = field(repr=False)
    _in_order: tuple[TensorChunks, ...] = field(repr=False)

    @classmethod
    def of(
        cls,
        layouts: Iterable[FileLayout],
        rows_per_weights: Mapping[str, int],
        chunk_elems: int = CHUNK_ELEMS,
    ) -> ChunkTable:
        """Number the chunks of outputs with these layouts.

        rows_per_weights  per tensor name, for tensors with more than one row of importances
        """
        tensors: dict[str, TensorChunks] = {}
        outputs: list[range] = []
        stop = 0
        for output, layout in enumerate(layouts):
            start = stop
            for info, offset in zip(layout.tensors, layout.offsets, strict=True):
                chunks = TensorChunks.of(
                    info,
                    offset,
                    rows_per_weights=rows_per_weights.get(info.name),
                    chunk_elems=chunk_elems,
                    output=output,
                    first=stop,
                )
                tensors[info.name] = chunks
                stop = chunks.numbers.stop
            outputs.append(range(start, stop))
        in_order = tuple(chunks for chunks in tensors.values() if len(chunks))
        return cls(tensors, tuple(outputs), tuple(chunks.first for chunks in in_order), in_order)

    @property
    def n_chunks(self) -> int:
        """How many chunks all outputs have together."""
        return self.outputs[-1].stop

    def task(self, number: int) -> ChunkTask:
        """The chunk with this number."""
        return self._in_order[bisect_right(self._starts, number) - 1].task(number)

    def __iter__(self) -> Iterator[ChunkTask]:
        """Yield all chunks in the order of their numbers, which is that of the files."""
        for chunks in self._in_order:
            yield from chunks


BYTES_VERSION = 1
"""Version of the encoded bytes. It goes up when the same plan and source would give other bytes: then no run
resumes an old partial, nor takes tensors of an older file (see provenance.py)."""

UNKNOWN = 0
"""Digest of a chunk that nobody has digested, and number of a tensor without provenance."""


class RowsDigest:
    """The digest of the rows of a chunk, which may come in several pieces, in their order."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, rows: npt.NDArray[Any]) -> None:
        """Take in the next rows, C-contiguous, of any dtype."""
        self._state.update(rows.reshape(-1).view(np.uint8).data)

    def value(self) -> int:
        """The digest so far, uint64, never UNKNOWN."""
        return self._state.intdigest() or 1
