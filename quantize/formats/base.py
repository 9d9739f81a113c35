"""What a codec is: a block dtype and two functions.

A format module has, in this order: the block's layout in its docstring, the `BLOCK` dtype, `dequantize`,
`quantize`, its kernels, and `FORMAT`, a `QuantFormat` that ties them together. `encode` and `decode` are what
nearly all of them do around their kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadWeights, NeedsImportance, ShapeError
from gguf_tools.ggml_types import GGMLType

Rows = npt.NDArray[Any]
"""(n_rows, n_cols) of float32, float16 or ml_dtypes.bfloat16."""

ROW_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

_SOURCE_ITEMS = dict(zip(ROW_DTYPES, (np.float32, np.int16, np.uint16), strict=True))

Blocks = npt.NDArray[Any]
"""(n_rows, n_blocks) of a format's BLOCK."""

Weights = npt.NDArray[np.float32] | None
"""float32 (n_cols,): how much an error in each column costs; None: no importances are known."""


@dataclass(frozen=True)
class QuantFormat:
    """A codec between float rows and the blocks of one ggml type.

    quantize(rows, weights)  rows as `Rows`, C-contiguous; weights as `Weights`.
                             Returns BLOCK (n_rows, n_cols // type.block_elems), C-contiguous.
                             Raises ShapeError if a row is not a whole number of blocks, or if weights
                             do not have one value per column.
    dequantize(blocks)       BLOCK (n_rows, n_blocks) -> float32 (n_rows, n_blocks * type.block_elems)
    """

    type: GGMLType
    BLOCK: np.dtype[Any]
    quantize: Callable[[Rows, Weights], Blocks]
    dequantize: Callable[[Blocks], npt.NDArray[np.float32]]


def as_source(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return rows as the flat array that kernels read, without a copy when they are C-contiguous and aligned.

    numba has no 16-bit floats, so their bits travel as integers, and the integer's type says which they are:
    float32 as it is, bfloat16 as uint16, float16 as int16. The array is read-only, whether rows are or not:
    these are two types to numba, and a kernel would be compiled for each.
    """
    if not (rows.flags.c_contiguous and rows.flags.aligned):
        rows = np.require(rows, requirements=["C", "A"])
    source = rows.reshape(-1).view(_SOURCE_ITEMS[rows.dtype])
    source.flags.writeable = False
    return source


def check_shape(rows: Rows, weights: Weights, type_: GGMLType) -> int:
    """Return the blocks per row of `rows` as `type_`.

    raises   ShapeError if rows are not two-dimensional or not floats, if a row is not a whole number of
             blocks, or if weights are not float32 (n_cols,)
    """
    if rows.ndim != 2:
        raise ShapeError(f"{type_.name}: rows must have 2 dimensions, found shape {rows.shape}")
    if rows.dtype not in ROW_DTYPES:
        raise ShapeError(f"{type_.name}: rows must be float32, float16 or bfloat16, found {rows.dtype}")
    n_cols = rows.shape[1]
    if n_cols % type_.block_elems:
        raise ShapeError(f"{type_.name}: row length {n_cols} is not a multiple of {type_.block_elems}")
    if weights is not None and (weights.shape != (n_cols,) or weights.dtype != np.float32):
        raise ShapeError(
            f"{type_.name}: importances must be float32 ({n_cols},), found {weights.dtype} {weights.shape}"
        )
    return n_cols // type_.block_elems


def encode(
    rows: Rows,
    weights: Weights,
    type_: GGMLType,
    block: np.dtype[Any],
    plain: Callable[..., int] | None = None,
    weighted: Callable[..., int] | None = None,
    tables: tuple[Any, ...] = (),
) -> Blocks:
    """Return `rows` as blocks, C-contiguous, made by one of two kernels.

    plain     called without importances: plain(source, *tables, out); None: there must be importances
    weighted  called with: weighted(source, importances, *tables, out); None: they are not used
    tables    constants of the kernels

    source and importances are those of `as_source`, out is uint8 of all blocks' bytes. A kernel returns -1,
    or the number of the first block that it can't encode, and leaves the rest undone.

    raises    ShapeError if rows or weights do not fit, NeedsImportance if there are none where there must be,
              BadWeights for a block that can't be encoded, as one with a NaN or an infinity
    """
    n_blocks = check_shape(rows, weights, type_)
    blocks = np.empty((len(rows), n_blocks), block)
    source, out = as_source(rows), blocks.view(np.uint8).reshape(-1)
    if weighted is not None and weights is not None:
        failure = weighted(source, as_source(weights), *tables, out)
    elif plain is not None:
        failure = plain(source, *tables, out)
    else:
        raise NeedsImportance(f"{type_.name}: this type needs importances; give an importance matrix")
    if failure >= 0:
        raise _refusal(rows, type_, failure)
    return blocks


def _refusal(rows: Rows, type_: GGMLType, number: int) -> BadWeights:
    """Return the error for block `number` of `rows`."""
    row, first = divmod(number * type_.block_elems, rows.shape[1])
    stop = first + type_.block_elems
    if np.isfinite(rows[row, first:stop].astype(np.float32)).all():
        reason = (
            "weights or importances are so large that squared errors overflow float32 (llama.cpp aborts"
            " here); choose another type"
        )
    else:
        reason = "a weight is not a finite number"
    return BadWeights(f"{type_.name}: row {row}, columns {first} to {stop - 1}: {reason}")


def decode(
    blocks: Blocks,
    type_: GGMLType,
    kernel: Callable[..., None],
    tables: tuple[Any, ...] = (),
    item: npt.DTypeLike = np.uint8,
) -> npt.NDArray[np.float32]:
    """Return the weights of BLOCK (n_rows, n_blocks), float32 (n_rows, n_cols), C-contiguous.

    kernel  called as kernel(data, *tables, out): data are the blocks as one array of `item`, out is float32
            of all weights
    """
    rows = np.empty((blocks.shape[0], blocks.shape[1] * type_.block_elems), np.float32)
    kernel(np.ascontiguousarray(blocks).reshape(-1).view(item), *tables, rows.reshape(-1))
    return rows
