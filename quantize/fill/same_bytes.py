"""Bytes compared: which blocks of stored rows are not what encoding gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import GGMLType


def differing_blocks(
    type_: GGMLType, made: npt.NDArray[Any], stored: npt.NDArray[Any], n_rows: int
) -> npt.NDArray[np.bool_]:
    """Tell which blocks of rows have other bytes, (n_groups, n_blocks).

    A group is one row. Where a type interleaves rows, or has bytes of its own for a row, the rows that hang
    together are one group of one block.

    made, stored  uint8, as many bytes each: whole groups
    """
    n_groups = n_rows // type_.rows_interleaved
    is_plain = type_.rows_interleaved == 1 and not type_.row_meta_bytes
    n_bytes = type_.block_bytes if is_plain else made.size // max(1, n_groups)
    return (made.reshape(n_groups, -1, n_bytes) != stored.reshape(n_groups, -1, n_bytes)).any(axis=2)
