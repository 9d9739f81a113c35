"""Finding NaN and infinity in weights.

A non-finite weight poisons its block, and through attention every token that the model ever computes.
llama.cpp notices when the model runs; we notice while its rows pass by.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from gguf_tools.errors import BadWeights
from gguf_tools.format.ggml_types import GGMLType
from quantize.formats.base import Bytes
from quantize.formats.finite import first_bad_scale, first_nonfinite


def check_finite(rows: npt.NDArray[Any], tensor: str, row_start: int, what: str = "weight") -> None:
    """Raise BadWeights, naming row and column, when `rows` (n_rows, n_cols) hold a NaN or an infinity.

    row_start  the number of the first of these rows, for the message
    """
    index = first_nonfinite(rows)
    if index >= 0:
        row, column = divmod(index, rows.shape[-1])
        value = float(rows.reshape(-1)[index])
        raise BadWeights(
            f"{tensor}: {what} at row {row_start + row}, column {column} is {value}, expected a finite number"
            " (the checkpoint is damaged, or overflowed when it was saved)"
        )


def check_stored(type_: GGMLType, data: Bytes, tensor: str, row_start: int) -> None:
    """Raise BadWeights, naming the row, when a scale of stored rows is a NaN or an infinity.

    data       uint8 (n_rows, row bytes), little-endian
    row_start  the number of the first of these rows, for the message
    """
    found = first_bad_scale(type_, data)
    if found is not None:
        row, _ = found
        raise BadWeights(
            f"{tensor}: a scale of {type_.name} in row {row_start + row} of the input is NaN or infinite,"
            " expected a finite number (the file is damaged; gguf-tools verify lists all such tensors)"
        )
