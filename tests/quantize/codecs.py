"""Codecs as tests call them: importances as plain arrays, row lengths known from the data."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import GGMLType, by_name
from quantize.formats import available, base, get_format
from quantize.formats.codecs import CODECS, DECODERS
from quantize.importances.weighting import ColumnWeights, Weighting

Floats = npt.NDArray[np.float32]

OF_IK = tuple(name for name in available() if by_name(name).id > 96)
"""The types that ik_llama.cpp alone has; llama.cpp has no bytes of them to compare with."""

OF_LLAMA = tuple(name for name in available() if name not in OF_IK)


def told_layout(name: str) -> str:
    """Return the docstring that tells a type's layout: its module's, or that of what decodes it."""
    path = CODECS[name].module if name in CODECS else DECODERS[name]
    module = import_module(path, "quantize.formats")
    told = [module.__doc__, *(each.__doc__ for each in vars(module).values() if callable(each))]
    (text,) = (text for text in told if text and re.match(f"(Decode )?{name}: ", text))
    return text


def weighting(weights: Floats | None) -> Weighting | None:
    """Return importances, float32 (n_cols,), as what an encoder takes."""
    return None if weights is None else ColumnWeights(weights)


def encode(type_: str | GGMLType, rows: npt.NDArray[Any], weights: Floats | None) -> npt.NDArray[np.uint8]:
    """Return the bytes of `rows`, uint8 (n_rows, bytes of a row)."""
    codec = get_format(type_)
    data = codec.encode(rows, weighting(weights))
    assert data.dtype == np.uint8
    assert data.shape == (len(rows), codec.type.row_bytes(rows.shape[1]))
    assert data.flags.c_contiguous
    return data


def decode(type_: str | GGMLType, data: npt.NDArray[np.uint8]) -> Floats:
    """Return the rows of uint8 (n_rows, bytes of a row)."""
    codec = get_format(type_)
    n_blocks = (data.shape[1] - codec.type.row_meta_bytes) // codec.type.block_bytes
    rows = codec.decode(data, n_blocks * codec.type.block_elems)
    assert rows.dtype == np.float32
    assert rows.shape == (len(data), n_blocks * codec.type.block_elems)
    return rows


def block_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a type's block."""
    return base.block_dtype(by_name(name))
