"""A tensor as a header describes it: name, shape, type, and the sizes that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from gguf_tools.errors import ShapeError
from gguf_tools.format.ggml_types import GGMLType


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor without its data.

    name   as stored
    shape  rows first, as in numpy: (n_mats, n_rows, n_cols); a file stores the reverse
    type   how rows are stored
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType

    @property
    def n_cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def n_rows(self) -> int:
        """Number of rows of all matrices together."""
        return prod(self.shape[:-1])

    @property
    def n_mats(self) -> int:
        return prod(self.shape[:-2])

    @property
    def n_elems(self) -> int:
        return prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; raises ShapeError naming the tensor."""
        try:
            return self.type.row_bytes(self.n_cols)
        except ShapeError as error:
            raise ShapeError(f"{self.name}: {error}") from None

    @property
    def n_bytes(self) -> int:
        """Bytes of the data without padding; raises ShapeError naming the tensor."""
        return self.n_rows * self.row_bytes + self.type.tensor_meta_bytes


CHUNK_BYTES = 16 << 20


def row_chunks(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) over all rows: about CHUNK_BYTES each, never cutting interleaved rows."""
    group = info.type.rows_interleaved
    step = max(CHUNK_BYTES // (info.row_bytes * group), 1) * group
    for start in range(0, info.n_rows, step):
        yield start, min(start + step, info.n_rows)
