"""Encode: rows of a source tensor as the bytes of an output tensor.

A job names, for every output tensor, where its rows come from and which importances weigh them; a chunk says
which rows. It knows no model and makes no decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gguf_tools.errors import BadWeights
from gguf_tools.ggml_types import BF16, F16, F32, GGMLType
from quantize.fill.chunks import ChunkTask
from quantize.fill.nonfinite import check_finite, first_nonfinite
from quantize.fill.sources import SourceTensor
from quantize.formats import get_format
from quantize.formats.base import Rows
from quantize.importance import ResolvedImportance

if TYPE_CHECKING:
    from quantize.fill.provenance import RowsDigest

STRIP_ELEMS = 256 * 1024
"""About how many weights are encoded at a time: as float32 they take half of a core's second cache."""

_FLOATS = frozenset({F32, F16, BF16})


@dataclass(frozen=True)
class FillJob:
    """What the tasks of a run refer to by name.

    sources      where the rows of each output tensor come from
    importances  the weights of the tensors that have some
    """

    sources: Mapping[str, SourceTensor]
    importances: Mapping[str, ResolvedImportance]

    def rows_per_weights(self) -> dict[str, int]:
        """Return, per tensor with importances, after how many rows the next row of weights begins."""
        return {name: found.rows_per_weights for name, found in self.importances.items()}


def encode_chunk(
    task: ChunkTask, target: GGMLType, job: FillJob, digest: RowsDigest | None = None
) -> np.ndarray:
    """Return the rows of `task` as the bytes of `target`, uint8 (task.n_bytes,); see `encode_strips`."""
    encoded = np.empty(task.n_bytes, np.uint8)
    for offset, data in encode_strips(task, target, job, digest):
        start = offset - task.offset
        encoded[start : start + data.size] = data
    return encoded


def encode_strips(
    task: ChunkTask, target: GGMLType, job: FillJob, digest: RowsDigest | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the rows of `task` as the bytes of `target`, uint8, with their offset in the file.

    Rows that are already of that type pass unchanged.
    digest  takes in all other rows
    raises  BadWeights for a NaN or infinity in the source, or a value that `target` can't hold
    """
    source = job.sources[task.tensor]
    if source.type == target:
        yield from _as_they_are(source, task)
        return
    codec = get_format(target)
    found = job.importances.get(task.tensor)
    weights = None if found is None else found.weights_of_row(task.row_start)
    offset = task.offset
    for row_start, rows in strips(source, task.row_start, task.row_stop):
        if digest is not None:
            digest.update(rows)
        try:
            blocks = codec.quantize(rows, weights)
        except BadWeights as error:
            check_finite(rows, task.tensor, row_start)  # says which weight it was
            raise BadWeights(f"{task.tensor}: rows from {row_start} on: {error}") from error
        if target in _FLOATS:  # the codecs of all others refuse what is not finite
            check_finite(rows, task.tensor, row_start)
        if target == F16:
            _check_half_range(rows, blocks, task.tensor, row_start)
        data = blocks.reshape(-1).view(np.uint8)
        del rows, blocks  # now, so that the next strip takes the same memory, which is still in the cache
        yield offset, data
        offset += data.size


def _as_they_are(source: SourceTensor, task: ChunkTask) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the rows of `task` as they are stored; those of floats are looked at while they pass."""
    offset = task.offset
    if source.type in _FLOATS:
        for row_start, rows in strips(source, task.row_start, task.row_stop):
            check_finite(rows, task.tensor, row_start)
            data = rows.reshape(-1).view(np.uint8)
            yield offset, data
            offset += data.size
        return
    group = source.type.rows_interleaved
    step = max(1, STRIP_ELEMS // source.shape[-1] // group) * group
    for first in range(task.row_start, task.row_stop, step):
        data = np.frombuffer(source.raw_rows(first, min(first + step, task.row_stop)), np.uint8)
        yield offset, data
        offset += data.size


def strips(source: SourceTensor, start: int, stop: int) -> Iterator[tuple[int, Rows]]:
    """Yield rows start .. stop - 1 of `source`, some at a time, each strip with the number of its first row.

    Every row passes here once. A strip stays in the cache of a core while it is read, decoded, checked and
    encoded, so that none of these has to wait for memory.
    """
    step = max(1, STRIP_ELEMS // source.shape[-1])
    if source.by_rows:
        for first in range(start, stop, step):
            yield first, source.read_rows(first, min(first + step, stop))
    else:
        rows = source.read_rows(start, stop)
        for first in range(start, stop, step):
            yield first, rows[first - start : first - start + step]


def _check_half_range(rows: Rows, blocks: np.ndarray, tensor: str, row_start: int) -> None:
    index = first_nonfinite(blocks.reshape(rows.shape).view(np.float16))
    if index >= 0:
        row, column = divmod(index, rows.shape[-1])
        raise BadWeights(
            f"{tensor}: weight at row {row_start + row}, column {column} is"
            f" {float(rows.reshape(-1)[index])}, beyond the range of F16 (65504); use BF16 or F32"
        )
