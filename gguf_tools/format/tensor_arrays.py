"""A tensor's bytes as an array."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gguf_tools.format.endian import swap_bytes
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.header import Endian
from gguf_tools.format.tensors import TensorInfo

if TYPE_CHECKING:
    import numpy as np

_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}


def is_plain(type_: GGMLType) -> bool:
    """Return whether a type is one of plain numbers, not of blocks."""
    return type_.name == "BF16" or type_.name in _DTYPES


def as_array(info: TensorInfo, data: np.ndarray, endian: Endian) -> np.ndarray:
    """Return the data of a tensor as an array of its shape, see GGUFFile.blocks.

    data  uint8 (n_bytes,), in the byte order `endian`
    """
    import numpy as np

    if endian != sys.byteorder:
        data = swap_bytes(info.type, data)
    if info.type.name == "BF16":
        import ml_dtypes

        return data.view(ml_dtypes.bfloat16).reshape(info.shape)
    if info.type.name in _DTYPES:
        return data.view(np.dtype(_DTYPES[info.type.name])).reshape(info.shape)
    return data.reshape(*info.shape[:-1], -1)
