"""Encode: rows of a source tensor as the bytes of an output tensor.

A job names, for every output tensor, where its rows come from and which importances weigh them; a row range
says which rows. Nothing here knows a model or makes a decision. Kernels are imported by what runs them, so
that a plan or a dry run does not wait for numba.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from gguf_tools.errors import BadWeights
from gguf_tools.ggml_types import BF16, F16, F32, GGMLType
from quantize.fill.calibrated import Calibrator
from quantize.fill.chunks import RowRange
from quantize.fill.digests import RowsDigest
from quantize.fill.sources import SourceSpec, SourceTensor
from quantize.formats import get_format
from quantize.formats.base import Rows
from quantize.importance import ResolvedImportance

STRIP_ELEMS = 256 * 1024
"""About how many weights are encoded at a time: as float32 they take half of a core's second cache."""

_FLOATS = frozenset({F32, F16, BF16})


@dataclass(frozen=True)
class FillJob:
    """What the tasks of a run refer to by name.

    sources      where the rows of each output tensor come from
    importances  of the tensors that have some
    spec         how another process opens the same sources; None: it gets these themselves
    calibrator   makes the calibrated tensors; None: there are none
    remote       files of the input that are not on this machine: name -> what it is recognised by
    """

    sources: Mapping[str, SourceTensor]
    importances: Mapping[str, ResolvedImportance]
    spec: SourceSpec | None = None
    calibrator: Calibrator | None = None
    remote: Mapping[str, str] = field(default_factory=dict)

    def is_encoded(self, tensor: str, target: GGMLType) -> bool:
        """Whether a tensor has to be encoded as `target`; otherwise its rows are copied."""
        return self.sources[tensor].type != target

    def is_calibrated(self, tensor: str) -> bool:
        return self.calibrator is not None and tensor in self.calibrator.names

    def rows_per_weights(self) -> dict[str, int]:
        """Return, per tensor with importances, after how many rows the next row of weights begins."""
        return {name: resolved.rows_per_weights for name, resolved in self.importances.items()}


def encode_rows(
    rows: RowRange, target: GGMLType, job: FillJob, digest: RowsDigest | None = None
) -> np.ndarray:
    """Return rows as the bytes of `target`, uint8 (n_bytes,); see `encode_strips`."""
    return np.concatenate(list(encode_strips(rows, target, job, digest)))


def encode_strips(
    rows: RowRange, target: GGMLType, job: FillJob, digest: RowsDigest | None = None
) -> Iterator[np.ndarray]:
    """Yield rows as the bytes of `target`, uint8, some rows at a time.

    Rows that are already of that type pass unchanged.
    rows    that share a matrix and a row of importances
    digest  takes in the rows that are encoded
    raises  BadWeights for a NaN or infinity in the source, or a value that `target` can't hold
    """
    source = job.sources[rows.tensor]
    if source.type == target:
        yield from _as_they_are(source, rows)
        return
    for first, strip in strips(source, rows.start, rows.stop, target.rows_interleaved):
        if digest is not None:
            digest.update(strip)
        data = encode_strip(strip, first, rows, target, job)
        del strip  # now, so that the next strip takes the same memory, which is still in the cache
        yield data


def encode_strip(strip: Rows, first: int, rows: RowRange, target: GGMLType, job: FillJob) -> np.ndarray:
    """Return some of the rows that share a matrix and a row of importances as the bytes of `target`, uint8.

    strip   the rows from `first` on, out of `rows`
    raises  BadWeights as `encode_strips`
    """
    from quantize.fill.nonfinite import check_finite

    resolved = job.importances.get(rows.tensor)
    weighting = None if resolved is None else resolved.weighting_of_row(rows.start)
    try:
        data = get_format(target).encode(strip, weighting)
    except BadWeights as error:
        check_finite(strip, rows.tensor, first)  # says which weight it was
        raise BadWeights(f"{rows.tensor}: rows from {first} on: {error}") from error
    if target in _FLOATS:  # the codecs of all others refuse what is not finite
        check_finite(strip, rows.tensor, first)
    if target == F16:
        _check_half_range(strip, data, rows.tensor, first)
    return data.reshape(-1)


def _as_they_are(source: SourceTensor, rows: RowRange) -> Iterator[np.ndarray]:
    """Yield rows as they are stored, uint8; those of floats are checked while they pass."""
    if source.type in _FLOATS:
        from quantize.fill.nonfinite import check_finite

        for first, strip in strips(source, rows.start, rows.stop):
            check_finite(strip, rows.tensor, first)
            yield strip.reshape(-1).view(np.uint8)
        return
    group = source.type.rows_interleaved
    step = max(1, STRIP_ELEMS // source.shape[-1] // group) * group
    for first in range(rows.start, rows.stop, step):
        yield np.frombuffer(source.raw_rows(first, min(first + step, rows.stop)), np.uint8)


def strips(source: SourceTensor, start: int, stop: int, group: int = 1) -> Iterator[tuple[int, Rows]]:
    """Yield rows start .. stop - 1 of `source`, some at a time, each strip with the number of its first row.

    Every row passes here once. A strip stays in the cache of a core while it is read, decoded, checked and
    encoded, so that none of these has to wait for memory.

    group  how many rows must stay together, because the target interleaves them
    """
    group = math.lcm(group, source.type.rows_interleaved)
    step = max(1, STRIP_ELEMS // source.shape[-1] // group) * group
    if source.by_rows:
        for first in range(start, stop, step):
            yield first, source.read_rows(first, min(first + step, stop))
    else:
        rows = source.read_rows(start, stop)
        for first in range(start, stop, step):
            yield first, rows[first - start : first - start + step]


def _check_half_range(rows: Rows, data: np.ndarray, tensor: str, row_start: int) -> None:
    from quantize.fill.nonfinite import first_nonfinite

    index = first_nonfinite(data.view(np.float16))
    if index >= 0:
        row, column = divmod(index, rows.shape[-1])
        raise BadWeights(
            f"{tensor}: weight at row {row_start + row}, column {column} is"
            f" {float(rows.reshape(-1)[index])}, beyond the range of F16 (65504); use BF16 or F32"
        )
