"""Rows of the trellis types around their search: weights brought to one size and into lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantize.formats.base import Bytes, Floats32, QuantFormat
from quantize.formats.ik.rows import SUPER_ELEMS, ik_format
from quantize.formats.ik.trellis.rows import (
    BLOCK_ELEMS,
    REACH,
    Measured,
    RowCodes,
    Task,
    Trellis,
    Trials,
    rows_of,
)
from quantize.simd.kernel import kernel_of
from quantize.simd.lanes import LANES

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Choices:
    """Choices of the search, by block of 256 weights.

    codes    (n_blocks, 8)  numbers of the sub-blocks' levels
    starts   (n_blocks, 8)  numbers of their starts
    indices  (n_blocks, groups)
    """

    codes: Integers
    starts: Integers
    indices: Integers


def trellis_format(
    trellis: Trellis,
    pack: Callable[[Choices, Floats32, Bytes], None],
    decode: Callable[..., None],
) -> QuantFormat:
    """Return the codec of a trellis type.

    pack    called as pack(choices, weights, out): weights float32 (n_blocks, 256); out, to be filled, uint8
            (n_blocks, bytes of a block)
    decode  the kernel of `decode_scaled_rows`
    """

    def quantize(source: Floats32, costs: Floats32, scales: Floats32, out: Bytes) -> int:
        sizes = np.abs(source.reshape(len(scales), -1)).max(axis=1)
        choices = _choose(source.reshape(len(scales), -1), sizes, costs, scales, trellis, search)
        scales *= sizes
        blocks = np.zeros((len(choices.codes), type_.block_bytes), np.uint8)
        pack(choices, source.reshape(-1, SUPER_ELEMS), blocks)
        out.reshape(len(scales), -1)[:, type_.row_meta_bytes :] = blocks.reshape(len(scales), -1)
        return -1

    type_, search = trellis.type, kernel_of(pack, rows_of(trellis))
    return ik_format(type_, trellis.dim, quantize, decode)


def _choose(
    rows: Floats32,
    sizes: Floats32,
    costs: Floats32,
    scales: Floats32,
    trellis: Trellis,
    search: Callable[..., None],
) -> Choices:
    """Return the choices for rows of largest magnitudes `sizes`; fill scales with those of rows of size 1."""
    unit_rows = rows / np.where(sizes > 0, sizes, 1)[:, np.newaxis]
    weights = np.abs(unit_rows) if trellis.magnitudes else unit_rows
    codes, starts = (np.zeros(rows.size // BLOCK_ELEMS, np.int32) for _ in range(2))
    indices = np.zeros(rows.size // trellis.dim, np.int32)
    factors, trees = zip(*trellis.trials, strict=True)
    trials = Trials(trellis.levels, np.array(factors, np.float32), np.array(trees, np.int32))
    output = RowCodes(scales, codes, starts, indices)
    search(Task(_measured(weights, costs, trellis.dim), trials, trellis.tree(), output))
    sub_blocks = SUPER_ELEMS // BLOCK_ELEMS
    return Choices(
        codes.reshape(-1, sub_blocks).astype(np.int64),
        starts.reshape(-1, sub_blocks).astype(np.int64),
        indices.reshape(-1, SUPER_ELEMS // trellis.dim).astype(np.int64),
    )


def _in_lanes(values: npt.NDArray[np.floating], dim: int) -> Floats32:
    """Return weights as the search reads them: by chunk of LANES groups, weight of the group, group."""
    chunks = values.reshape(-1, LANES, dim).transpose(0, 2, 1)
    return np.ascontiguousarray(chunks, np.float32).reshape(-1)


def _measured(weights: npt.NDArray[np.floating], costs: Floats32, dim: int) -> Measured:
    """Return weights as the search reads them, with how distances to points are measured in each group.

    The root of a cost is multiplied by a number of its group, as large as 16 bits allow for weights that are
    REACH levels at most.

    roots  int32 (n_cols / 2,)     256 times the roots, 16 bits each: columns 0 and 2 of four, then 1 and 3
    steps  float32 (n_cols,)       the roots, in the order of `_in_lanes`
    units  float32 (n_cols / dim,) what a squared distance of 1 is in costs
    """
    roots = np.sqrt(costs.reshape(-1, dim).astype(np.float64))
    farthest = roots * (_LARGEST_LEVEL + float(REACH))
    total = np.sqrt((farthest**2).sum(axis=1))
    factors = np.minimum(
        np.minimum(_LARGEST_DISTANCE / total, _LARGEST_HALF / farthest.max(axis=1)),
        _LARGEST_ROOT / roots.max(axis=1),
    )
    integers = np.rint(256 * factors[:, np.newaxis] * roots).astype(np.int64)
    fours = integers.reshape(-1, 4)
    pairs = (fours[:, :2] | fours[:, 2:] << 16).astype(np.int32)
    return Measured(
        _in_lanes(weights, dim),
        _in_lanes(costs, dim),
        _in_lanes(integers / 256, dim),
        pairs.reshape(-1),
        (1 / factors**2).astype(np.float32),
    )


_LARGEST_LEVEL = 126
_LARGEST_HALF = 32000.0
_LARGEST_DISTANCE = 46000.0  # its square is below 2**31
_LARGEST_ROOT = 127.9
