"""One array: encoded as a ggml type, or decoded; and the values of a tensor of a file."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.argument_types import checked
from gguf_tools.errors import ShapeError
from gguf_tools.format.ggml_types import GGMLType, by_name
from gguf_tools.format.reader import GGUFSource
from quantize.formats import get_decoder, get_format
from quantize.formats.base import ROW_DTYPES
from quantize.importances.entries import checked_weights
from quantize.importances.weighting import ColumnWeights
from quantize.type_names import TypeName


@checked
def encode(
    array: npt.ArrayLike, type_: TypeName | GGMLType, importances: npt.ArrayLike | None = None
) -> npt.NDArray[np.uint8]:
    """Encode the rows of an array as a ggml type, uint8 (..., row_bytes).

        encode(weights, "Q4_K").shape       # weights (4096, 2048): (4096, 1152)

    array        floats (..., n_cols) of any dtype; other than float32, float16 and bfloat16 they are rounded
                 to float32 first
    importances  how much each column counts: (n_cols,), or (n_mats, n_cols) for an array of as many matrices
    raises       QuantError for a type without an encoder, ShapeError for rows that it can't hold,
                 NeedsImportance, BadImportance, BadWeights
    """
    rows = np.asarray(array)
    if rows.ndim == 0:
        raise ShapeError("a single number is no row")
    if rows.dtype not in ROW_DTYPES:
        rows = rows.astype(np.float32)
    format_ = get_format(type_)
    n_cols = rows.shape[-1]
    if importances is None:
        return format_.encode(rows.reshape(-1, n_cols), None).reshape(*rows.shape[:-1], -1)
    weights = checked_weights(importances)
    if weights.ndim == 1:
        data = format_.encode(rows.reshape(-1, n_cols), ColumnWeights(weights))
        return data.reshape(*rows.shape[:-1], -1)
    if weights.shape != (*rows.shape[:-2], n_cols):
        raise ShapeError(
            f"importances {weights.shape}, expected ({n_cols},) or {(*rows.shape[:-2], n_cols)} for an array"
            f" {rows.shape}"
        )
    matrices = zip(rows.reshape(-1, *rows.shape[-2:]), weights.reshape(-1, n_cols), strict=True)
    encoded = [format_.encode(matrix, ColumnWeights(values)) for matrix, values in matrices]
    return np.concatenate(encoded).reshape(*rows.shape[:-1], -1)


@checked
def decode(data: npt.NDArray[np.uint8], type_: TypeName | GGMLType) -> npt.NDArray[np.float32]:
    """Decode the bytes of a ggml type to float32 (..., n_cols); the inverse of `encode`.

        values = decode(encode(weights, "Q4_K"), "Q4_K")

    data    uint8 (..., row_bytes)
    raises  QuantError for a type without a decoder, ShapeError for bytes that are no whole rows
    """
    data = np.asarray(data)
    kind = by_name(type_.upper()) if isinstance(type_, str) else type_
    decoder = get_decoder(kind)
    if data.ndim == 0 or data.dtype != np.uint8 or (data.shape[-1] - kind.row_meta_bytes) % kind.block_bytes:
        raise ShapeError(
            f"{kind.name}: rows are whole blocks of {kind.block_bytes} uint8, found {data.dtype} {data.shape}"
        )
    n_cols = (data.shape[-1] - kind.row_meta_bytes) // kind.block_bytes * kind.block_elems
    return decoder(data.reshape(-1, data.shape[-1]), n_cols).reshape(*data.shape[:-1], n_cols)


@checked
def read_values(source: GGUFSource, name: str) -> npt.NDArray[np.float32]:
    """Read the values of a tensor of a GGUF file, whatever its type is: float32, in its shape.

        read_values(gguf_tools.open_gguf("model-Q4_K_M.gguf"), "blk.0.ffn_down.weight")

    raises  FormatError for a tensor that isn't there, QuantError for a type without a decoder
    """
    info = source.tensor(name)
    stored = source.blocks(name)
    if stored.shape == info.shape:
        return stored.astype(np.float32)
    return decode(stored, info.type).reshape(info.shape)
