"""What a codec is: a block dtype and two functions.

A format module has, in this order: the block's layout in its docstring, the `BLOCK` dtype, `dequantize`,
`quantize`, its kernels, and `FORMAT`, a `QuantFormat` that ties them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gguf_tools.errors import ShapeError
from gguf_tools.ggml_types import GGMLType

Rows = npt.NDArray[Any]
"""(n_rows, n_cols) of float32, float16 or ml_dtypes.bfloat16."""

ROW_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

Blocks = npt.NDArray[Any]
"""(n_rows, n_blocks) of a format's BLOCK."""

Weights = npt.NDArray[np.float32] | None
"""float32 (n_cols,): how much an error in each column costs; None: no importances are known."""


class ImportanceUse(Enum):
    """What a format does with column importances."""

    IGNORED = "ignored"
    OPTIONAL = "optional"
    REQUIRED = "required"


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
    importance: ImportanceUse


def as_float32(rows: Rows) -> npt.NDArray[np.float32]:
    """Return `rows` as float32, C-contiguous; the same array when it already is.

    rows     (n_rows, n_cols) of float32, float16 or ml_dtypes.bfloat16; all three convert exactly
    raises   ShapeError if rows are of another dtype
    """
    if rows.dtype == np.float32:
        return np.ascontiguousarray(rows)
    if rows.dtype in ROW_DTYPES:
        return rows.astype(np.float32, order="C")
    raise ShapeError(f"rows must be float32, float16 or bfloat16, found {rows.dtype}")


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
