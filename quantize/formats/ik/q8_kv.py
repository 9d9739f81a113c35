"""Q8_KV: weights of 8 bits, 32 to a block, with a scale for the whole row.

A row starts with d, float32, and the sum of its codes, int32. Then come its codes q, int8:

    weight[i] = d * q[i]

Source: iqk_quantize_row_q8_KV and dequantize_row_q8_KV of ik_llama.cpp 8337e4c.
"""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import Q8_KV
from quantize.formats.base import Bytes, Floats32, QuantFormat, Rows, check_data
from quantize.formats.ik.levels.scale_search import inverse_of, power_of
from quantize.formats.ik.rows import encode_rows
from quantize.importances.weighting import Weighting
from quantize.simd.floats import ZERO, nearest_float
from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import load, store
from quantize.simd.lanes import LANES, Floats, absolute, bits, maximum, select, splat, to_int


def encode(rows: Rows, weighting: Weighting | None) -> Bytes:
    """Return `rows` as Q8_KV."""
    return encode_rows(rows, weighting, Q8_KV, 32, _quantize)


def decode(data: Bytes, n_cols: int) -> Floats32:
    """Return the weights of rows of Q8_KV."""
    check_data(data, n_cols, Q8_KV)
    scales = np.ascontiguousarray(data[:, :4]).view("<f4")
    codes = np.ascontiguousarray(data[:, Q8_KV.row_meta_bytes :]).view(np.int8)
    with np.errstate(all="ignore"):
        rows: Floats32 = codes.astype(np.float32) * scales.astype(np.float32)
    return rows


_META_BYTES = Q8_KV.row_meta_bytes
_TOP = 127


@inlinable
def _of_all_lanes(value: Floats, is_sum: bool) -> Floats:
    """Return the sum of all lanes, or the largest of them, in every lane."""
    items = np.empty(LANES, np.float32)
    store(items, 0, value)
    result = ZERO
    for item in items:
        result = result + item if is_sum else max(result, item)
    return splat(result)


@kernel
def _quantize(source: Floats32, importances: Floats32, out: Bytes) -> int:
    """Encode each row: the scale that its largest weight asks for, then the best one for the codes it makes.

    Lanes are neighbours in a row.
    """
    n_cols = importances.size
    codes = np.empty(n_cols, np.int32)
    d_and_sum = np.empty(LANES, np.int32)
    for row in range(source.size // n_cols):
        start = row * n_cols
        largest = splat(ZERO)
        for i in range(0, n_cols, LANES):
            largest = maximum(largest, absolute(load(source, start + i)))
        largest = _of_all_lanes(largest, False)
        power = power_of(largest)
        inverse = select(largest > ZERO, np.float32(_TOP) / (largest * power), ZERO)
        sum_lx = splat(ZERO)
        sum_l2 = splat(ZERO)
        for i in range(0, n_cols, LANES):
            x = load(source, start + i) * power
            level = nearest_float(x * inverse, -_TOP, _TOP)
            weighted = load(importances, i) * level
            sum_lx += weighted * x
            sum_l2 += weighted * level
        sum_lx, sum_l2 = _of_all_lanes(sum_lx, True), _of_all_lanes(sum_l2, True)
        d = select(sum_l2 > ZERO, sum_lx / sum_l2, ZERO) * inverse_of(power)
        scale = d * power
        inverse = select(scale != ZERO, np.float32(1) / scale, ZERO)
        total = splat(0)
        for i in range(0, n_cols, LANES):
            code = to_int(nearest_float(load(source, start + i) * power * inverse, -_TOP, _TOP))
            store(codes, i, code)
            total += code
        store(d_and_sum, 0, bits(d))
        word = d_and_sum[0]
        store(d_and_sum, 0, total)
        row_bytes = out[row * (n_cols + _META_BYTES) : (row + 1) * (n_cols + _META_BYTES)]
        sum_of_codes = 0
        for lane in range(LANES):
            sum_of_codes += d_and_sum[lane]
        for byte in range(4):
            row_bytes[byte] = word >> 8 * byte & 0xFF
            row_bytes[4 + byte] = sum_of_codes >> 8 * byte & 0xFF
        for i in range(n_cols):
            row_bytes[_META_BYTES + i] = codes[i] & 0xFF
    return -1


FORMATS = (QuantFormat(Q8_KV, encode, decode),)
