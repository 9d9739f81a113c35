"""Encode: rows of a source tensor as the bytes of an output tensor.

A job names, for every output tensor, where its rows come from and which importances weigh them; a chunk says
which rows. It knows no model and makes no decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gguf_tools.errors import BadWeights
from gguf_tools.ggml_types import BF16, F16, F32, GGMLType
from quantize.chunks import ChunkTask
from quantize.finite import check_finite, first_nonfinite
from quantize.formats import get_format
from quantize.importance import ResolvedImportance
from quantize.source import SourceTensor

if TYPE_CHECKING:
    from quantize.provenance import RowsDigest

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
    """Return the rows of `task` as the bytes of `target`, uint8 (task.n_bytes,).

    Rows that are already of that type pass unchanged.
    digest  takes in all other rows
    raises  BadWeights for a NaN or infinity in the source, or a value that float16 can't hold
    """
    source = job.sources[task.tensor]
    if source.type == target and target not in _FLOATS:
        return np.frombuffer(source.raw_rows(task.row_start, task.row_stop), np.uint8)
    rows = source.read_rows(task.row_start, task.row_stop)
    if digest is not None:
        digest.update(rows)
    check_finite(rows, task.tensor, task.row_start)
    found = job.importances.get(task.tensor)
    weights = None if found is None else found.weights_of_row(task.row_start)
    blocks = get_format(target).quantize(rows, weights)
    if target == F16 and source.type != F16:
        _check_half_range(task, rows, blocks)
    return blocks.reshape(-1).view(np.uint8)


def _check_half_range(task: ChunkTask, rows: np.ndarray, blocks: np.ndarray) -> None:
    index = first_nonfinite(blocks.reshape(rows.shape).view(np.float16))
    if index >= 0:
        row, column = divmod(index, rows.shape[-1])
        raise BadWeights(
            f"{task.tensor}: weight at row {task.row_start + row}, column {column} is"
            f" {float(rows.reshape(-1)[index])}, beyond the range of F16 (65504); use BF16 or F32"
        )
