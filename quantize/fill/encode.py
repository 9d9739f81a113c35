"""Encode: rows of a source tensor as the bytes of an output tensor.

`RowSources` say, for every output tensor, where its rows come from and which importances weigh them; a row
range says which rows. Nothing here knows a model or makes a decision. Kernels are imported by what runs them,
so that a plan or a dry run does not wait for numba.

A NaN or an infinity in the weights is an error. It poisons its block, and through attention every token that
the model ever computes. llama.cpp notices when the model runs; we notice while its rows pass by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadWeights
from gguf_tools.format.block_layouts import swap_bytes
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.header import Endian
from quantize.fill.chunks import RowRange, RowsDigest
from quantize.fill.sources import FLOAT_DTYPES, SourceSpec, SourceTensor
from quantize.formats import get_format
from quantize.formats.base import BlockRefused, Bytes, Rows
from quantize.importances.entries import ResolvedImportance
from quantize.importances.weighting import Weighting

ERRORS_RISE = 2.0
"""Factor by which the relative error of a calibrated tensor may exceed its type's limit. Plain errors of
weights rise by 30 to 60% on purpose: they go where the activations are small."""


STRIP_ELEMS = 256 * 1024
"""About how many weights are encoded at a time: as float32 they take half of a core's second cache."""


@dataclass(frozen=True)
class RowSources:
    """Where the rows of each output tensor come from, and what weighs them.

    tensors      by their names in the output
    importances  of the tensors that have some
    spec         how another process opens the same tensors; None: it gets these themselves
    remote       files of the input that are not on this machine: name -> what it is recognised by
    """

    tensors: Mapping[str, SourceTensor]
    importances: Mapping[str, ResolvedImportance]
    spec: SourceSpec | None = None
    remote: Mapping[str, str] = field(default_factory=dict)

    def is_encoded(self, tensor: str, target: GGMLType) -> bool:
        """Whether a tensor has to be encoded as `target`; otherwise its rows are copied."""
        return self.tensors[tensor].type != target

    def weighting_of(self, rows: RowRange) -> Weighting | None:
        """Look up the weighting of rows that share a row of importances; None: all columns count alike."""
        resolved = self.importances.get(rows.tensor)
        return None if resolved is None else resolved.weighting_of_row(rows.start)

    def rows_per_weights(self) -> dict[str, int]:
        """Say, per tensor with importances, after how many rows the next row of weights begins."""
        return {name: resolved.rows_per_weights for name, resolved in self.importances.items()}


@dataclass(frozen=True)
class Target:
    """Form that rows take in one output.

    sources  where the rows come from, and the importances that weigh them
    endian   byte order of the output
    """

    type: GGMLType
    sources: RowSources
    endian: Endian = "little"

    def stored(self, data: Bytes) -> Bytes:
        """Bring encoded rows into the form that the output stores, uint8 (n_bytes,)."""
        return in_byte_order(data, self.type, self.endian)


def encode_rows(rows: RowRange, type_: GGMLType, sources: RowSources) -> Bytes:
    """Encode rows as a type, uint8 (n_bytes,); see `encode_strips`."""
    return np.concatenate([data for (data,) in encode_strips(rows, [Target(type_, sources)])])


def encode_strips(
    rows: RowRange, targets: Sequence[Target], digest: RowsDigest | None = None
) -> Iterator[tuple[Bytes, ...]]:
    """Yield rows as the bytes of each target, uint8 (n_bytes,), some rows at a time.

    This is all that happens to rows on their way into outputs: they are read, once for all targets, digested,
    checked, encoded, interleaved, and brought into the outputs' byte order.

    rows     that share a matrix and a row of importances
    targets  of the same rows of the same source. Where a target has the source's type, it is the only one,
             and rows pass unchanged
    digest   takes in the rows that are encoded
    raises   BadWeights, naming tensor, row and value, for a NaN or infinity in the source, and for a value
             that a target can't hold
    """
    source = targets[0].sources.tensors[rows.tensor]
    if any(target.type == source.type for target in targets):
        (target,) = targets
        for data in _as_they_are(source, rows):
            yield (target.stored(data),)
        return
    weightings = [target.sources.weighting_of(rows) for target in targets]
    group = math.lcm(*(target.type.rows_interleaved for target in targets))
    for first, strip in strips(source, rows.start, rows.stop, group):
        if digest is not None:
            digest.update(strip)
        encoded = tuple(
            target.stored(encode_strip(strip, first, rows.tensor, target.type, weighting))
            for target, weighting in zip(targets, weightings, strict=True)
        )
        del strip  # now, so that the next strip takes the same memory, which is still in the cache
        yield encoded


def encode_strip(strip: Rows, first: int, tensor: str, type_: GGMLType, weighting: Weighting | None) -> Bytes:
    """Encode rows of a tensor as a type, uint8 (n_rows, row bytes).

    first   the number of the first of the rows
    raises  BadWeights as `encode_strips`
    """
    try:
        return get_format(type_).encode(strip, weighting)
    except BlockRefused as error:
        check_finite(strip, tensor, first)  # says which weight it was
        raise error.within(tensor, first) from error


def in_byte_order(data: Bytes, type_: GGMLType, endian: Endian) -> Bytes:
    """Bring encoded rows, flat, into the byte order of an output."""
    flat = data.reshape(-1)
    return swap_bytes(type_, flat) if endian == "big" else flat


def digest_rows(rows: RowRange, source: SourceTensor) -> int:
    """Digest rows as `encode_strips` does, without encoding them."""
    digest = RowsDigest()
    for _, strip in strips(source, rows.start, rows.stop):
        digest.update(strip)
    return digest.value()


def _as_they_are(source: SourceTensor, rows: RowRange) -> Iterator[Bytes]:
    """Yield rows as they are stored, uint8, checked while they pass: floats, and scales of blocks."""
    if source.type in FLOAT_DTYPES:
        for first, strip in strips(source, rows.start, rows.stop):
            check_finite(strip, rows.tensor, first)
            yield strip.reshape(-1).view(np.uint8)
        return
    group = source.type.rows_interleaved
    step = max(1, STRIP_ELEMS // source.shape[-1] // group) * group
    for first in range(rows.start, rows.stop, step):
        stop = min(first + step, rows.stop)
        data = np.frombuffer(source.raw_rows(first, stop), np.uint8)
        check_stored(source.type, data.reshape(stop - first, -1), rows.tensor, first)
        yield data


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


def check_finite(rows: npt.NDArray[Any], tensor: str, row_start: int) -> None:
    """Raise BadWeights, naming row and column, when `rows` (n_rows, n_cols) hold a NaN or an infinity.

    row_start  the number of the first of these rows, for the message
    """
    from quantize.formats.finite import first_nonfinite

    index = first_nonfinite(rows)
    if index >= 0:
        row, column = divmod(index, rows.shape[-1])
        value = float(rows.reshape(-1)[index])
        raise BadWeights(
            f"{tensor}: weight at row {row_start + row}, column {column} is {value}, expected a finite number"
            " (the checkpoint is damaged, or overflowed when it was saved)"
        )


def check_stored(type_: GGMLType, data: Bytes, tensor: str, row_start: int) -> None:
    """Raise BadWeights, naming the row, when a scale of stored rows is a NaN or an infinity.

    data       uint8 (n_rows, row bytes), little-endian
    row_start  the number of the first of these rows, for the message
    """
    from quantize.formats.finite import first_bad_scale

    found = first_bad_scale(type_, data)
    if found is not None:
        row, _ = found
        raise BadWeights(
            f"{tensor}: a scale of {type_.name} in row {row_start + row} of the input is NaN or infinite,"
            " expected a finite number (the file is damaged; gguf-tools verify lists all such tensors)"
        )
