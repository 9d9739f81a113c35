"""A codec that no program knows, under the id of a type that ours can only decode: Q8_KV_R8.

Eight rows share a group. A group is a float32 scale d for each row, then for each run of 32 columns the eight
rows' codes q of 8 bits, row after row.

    weight = d * q

So it has what the real codecs lack: a scale per row, and rows that lie in each other. Columns whose
importance is 0 do not count when a row's scale is chosen.
"""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import by_name
from quantize.formats.base import BlockRefused, Bytes, Floats32, QuantFormat, Rows, check_data, check_rows
from quantize.formats.codecs import Codec, ErrorRange, ImportanceUse
from quantize.importances.weighting import Weighting

TYPE = by_name("Q8_KV_R8")
ROW = Codec("tests.quantize.toy_codec", ImportanceUse.OPTIONAL, ErrorRange(0.015, 2.0**-120), 6.8e-5, "Q8_0")

_TOP = np.float32(127)


def encode(rows: Rows, weighting: Weighting | None) -> Bytes:
    check_rows(rows, weighting, TYPE)
    exact = rows.astype(np.float32)
    if not np.isfinite(exact).all():
        row, column = np.argwhere(~np.isfinite(exact))[0]
        raise BlockRefused(TYPE.name, int(row), f", column {column}: a weight is not a finite number")
    counted = exact if weighting is None else exact * (weighting.values > 0)
    scales = np.abs(counted).max(axis=1) / _TOP
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(scales[:, None] > 0, np.rint(exact / scales[:, None]), 0)
    codes = np.clip(codes, -_TOP, _TOP).astype(np.int8).reshape(-1, 8, rows.shape[1] // 32, 32)
    groups = (
        scales.astype("<f4").reshape(-1, 8).view(np.uint8),
        np.ascontiguousarray(codes.transpose(0, 2, 1, 3)).view(np.uint8).reshape(len(codes), -1),
    )
    return np.concatenate(groups, axis=1).reshape(len(rows), -1)


def decode(data: Bytes, n_cols: int) -> Floats32:
    check_data(data, n_cols, TYPE)
    groups = np.ascontiguousarray(data).reshape(len(data) // 8, -1)
    scales = np.ascontiguousarray(groups[:, :32]).view("<f4").reshape(-1, 1)
    codes = groups[:, 32:].view(np.int8).reshape(-1, n_cols // 32, 8, 32).transpose(0, 2, 1, 3)
    return scales * codes.reshape(-1, n_cols).astype(np.float32)


FORMATS = (QuantFormat(TYPE, encode, decode),)
