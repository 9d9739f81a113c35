"""Decoding kernels of quantized checkpoints. Those of packed formats take codes out of words and make weights
of codes.

That has two steps. The first brings the codes of a row range into the order of the weight, one byte each;
formats differ here. The second scales them by groups of columns:

    weight[i, j] = (float32(code[i, j]) - zero[i, g]) * scale[i, g]        g the group of column j

With whole zero points the difference is exact, so that the product is the exact value rounded once.

"Packed low first" means one stream of bits per row, little endian: code k of `bits` bits stands at bits
k * bits to (k + 1) * bits, whether that crosses a word or not. Importing this module loads numba.

The byte in between costs little. One core unpacks 50e9 codes/s of 4 bits (2e9 of other widths, which go
through the general kernel) and scales 13e9 weights/s in groups of 128, 1.2e9 where every column has its own
group. LLVM vectorises the inner loops because they use slices; with index arithmetic they reach 0.5e9.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantize.simd.kernel import inlinable, kernel
from quantize.simd.lane_memory import gather, load, store
from quantize.simd.lanes import LANES, Floats, any_lane, bits, from_bits, select, to_float


def unpack(words: np.ndarray, bits: int, n_codes: int) -> np.ndarray:
    """Return the first `n_codes` codes of every row of `words`, packed low first, uint8 (n_rows, n_codes).

    words  integers of any size (n_rows, n_words), little endian
    bits   1 to 8
    """
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data[:, :n_codes]
    if bits == 4:
        codes = np.empty((len(data), 2 * data.shape[1]), np.uint8)
        unpack_nibbles(data, codes)
        return codes[:, :n_codes]
    codes = np.empty((len(data), -(-n_codes // 8) * 8), np.uint8)
    unpack_stream(data, bits, codes)
    return codes[:, :n_codes]


def unpack_planes(words: np.ndarray, bits: int, n_codes: int) -> np.ndarray:
    """Return codes whose low and high bits are stored apart, uint8 (n_rows, n_codes).

    Every 32 codes take `bits` 32-bit words: a plane with their lowest bits, then planes with the higher ones,
    each packed low first. Planes are as wide as powers of two allow: 3 = 2 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1.
    """
    n_rows, n_runs = len(words), words.shape[1] // bits
    by_32 = words.reshape(n_rows, n_runs, bits)
    codes = np.zeros((n_rows, n_runs * 32), np.uint8)
    shift = 0
    for width in (4, 2, 1):
        if bits & width:
            plane = by_32[:, :, shift : shift + width].reshape(n_rows, n_runs * width)
            codes |= unpack(plane, width, codes.shape[1]) << np.uint8(shift)
            shift += width
    return codes[:, :n_codes]


@kernel
def unpack_nibbles(data: np.ndarray, codes: np.ndarray) -> None:
    """Write the low and the high half of every byte.

    data   uint8 (n_rows, n_bytes)
    codes  uint8 (n_rows, 2 * n_bytes)
    """
    low, shift = np.uint8(15), np.uint8(4)
    for i in range(data.shape[0]):
        for j in range(data.shape[1]):
            codes[i, 2 * j] = data[i, j] & low
            codes[i, 2 * j + 1] = data[i, j] >> shift


@kernel
def unpack_stream(data: np.ndarray, bits: int, codes: np.ndarray) -> None:
    """Write codes packed low first; eight of them are `bits` bytes.

    data   uint8 (n_rows, n_bytes); what is missing for the last eight counts as zeros
    codes  uint8 (n_rows, n_codes), n_codes a multiple of 8
    """
    mask = np.uint64((1 << bits) - 1)
    n_bytes = data.shape[1]
    for i in range(data.shape[0]):
        for j in range(codes.shape[1] // 8):
            word = np.uint64(0)
            for k in range(min(bits, n_bytes - j * bits)):
                word |= np.uint64(data[i, j * bits + k]) << np.uint64(8 * k)
            for k in range(8):
                codes[i, 8 * j + k] = (word >> np.uint64(k * bits)) & mask


@kernel
def unpack_across(words: np.ndarray, order: np.ndarray, codes: np.ndarray) -> None:
    """Write the eight 4-bit codes of every word to eight rows; field k, low first, belongs to row order[k].

    words  uint32 (n_words, n_cols)
    order  int64 (8,)
    codes  uint8 (8 * n_words, n_cols)
    """
    low = np.uint32(15)
    for w in range(words.shape[0]):
        source = words[w]
        for field in range(8):
            row = codes[8 * w + order[field]]
            shift = np.uint32(4 * field)
            for j in range(row.size):
                row[j] = (source[j] >> shift) & low


@kernel
def untile(tiles: np.ndarray, places: np.ndarray, codes: np.ndarray) -> None:
    """Write codes that are stored tile by tile, shuffled in each: places[r, c] is where code (r, c) stands.

    tiles   uint8 (n_down, n_across, tile_elems)
    places  uint32 (tile_rows, tile_cols)
    codes   uint8 (n_down * tile_rows, n_across * tile_cols)
    """
    tile_rows, tile_cols = places.shape
    for down in range(tiles.shape[0]):
        for across in range(tiles.shape[1]):
            tile = tiles[down, across]
            for r in range(tile_rows):
                place = places[r]
                row = codes[down * tile_rows + r, across * tile_cols : (across + 1) * tile_cols]
                for c in range(tile_cols):
                    row[c] = tile[place[c]]


@kernel
def scale_groups(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_size: int, out: np.ndarray
) -> None:
    """Write (code - zero) * scale for groups of `group_size` columns; the last group may be shorter.

    codes          uint8 or int8 (n_rows, n_cols)
    zeros, scales  float32 (n_rows, n_groups)
    out            float32 (n_rows, n_cols)
    """
    for i in range(codes.shape[0]):
        for group in range(scales.shape[1]):
            zero, scale = zeros[i, group], scales[i, group]
            start = group * group_size
            part = codes[i, start : start + group_size]
            result = out[i, start : start + group_size]
            for j in range(part.size):
                result[j] = (np.float32(part[j]) - zero) * scale


@kernel
def scale_columns(
    codes: np.ndarray, groups: np.ndarray, zeros: np.ndarray, scales: np.ndarray, out: np.ndarray
) -> None:
    """Write (code - zero) * scale where every column says which group it is in.

    codes          uint8 (n_rows, n_cols)
    groups         uint32 (n_cols,)
    zeros, scales  float32 (n_rows, n_groups)
    out            float32 (n_rows, n_cols)
    """
    for i in range(codes.shape[0]):
        row, zero, scale, result = codes[i], zeros[i], scales[i], out[i]
        for j in range(result.size):
            group = groups[j]
            result[j] = (np.float32(row[j]) - zero[group]) * scale[group]


@kernel
def add_products(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Add the product of two matrices, whose terms are summed in the order of the inner axis.

    left   float32 (n_rows, rank)
    right  float32 (rank, n_cols)
    out    float32 (n_rows, n_cols)
    """
    for i in range(left.shape[0]):
        result = out[i]
        for k in range(right.shape[0]):
            factor, row = left[i, k], right[k]
            for j in range(result.size):
                result[j] += factor * row[j]


@kernel
def scale_sorted(
    codes: np.ndarray,
    starts: np.ndarray,
    columns: np.ndarray,
    zeros: np.ndarray,
    scales: np.ndarray,
    row: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write (code - zero) * scale for groups of any length whose columns were sorted, in their own order.

    codes    uint8 (n_rows, n_cols), sorted
    starts   int64 (n_groups + 1,): where the groups begin, and where the last one ends
    columns  uint32 (n_cols,): where column j stands in the sorted order
    zeros    float32 (n_groups,)
    scales   float32 (n_rows, n_groups)
    row      float32 (n_cols,), scratch: scaled in sorted order first, a weight costs one look-up, not four
    out      float32 (n_rows, n_cols)
    """
    for i in range(codes.shape[0]):
        for group in range(zeros.size):
            zero, scale = zeros[group], scales[i, group]
            part = codes[i, starts[group] : starts[group + 1]]
            scaled = row[starts[group] : starts[group + 1]]
            for j in range(part.size):
                scaled[j] = (np.float32(part[j]) - zero) * scale
        result = out[i]
        for j in range(result.size):
            result[j] = row[columns[j]]


@kernel
def scale_and_add_groups(
    codes: np.ndarray, addends: np.ndarray, scales: np.ndarray, group_size: int, out: np.ndarray
) -> None:
    """Write code * scale + addend for groups of `group_size` columns; the last group may be shorter.

    Shapes and dtypes as in `scale_groups`.
    """
    for i in range(codes.shape[0]):
        for group in range(scales.shape[1]):
            addend, scale = addends[i, group], scales[i, group]
            start = group * group_size
            part = codes[i, start : start + group_size]
            result = out[i, start : start + group_size]
            for j in range(part.size):
                result[j] = np.float32(part[j]) * scale + addend


@kernel
def look_up_nibbles(data: np.ndarray, values: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Write values[code] * scale of its block; the high half of a byte comes first.

    data    uint8 (n_bytes,), the last block may be cut short
    values  float32 (16,)
    scales  float32 (n_blocks,)
    out     float32 (n_blocks, block_elems), block_elems even; what has no byte is left as it is
    """
    low, shift = np.uint8(15), np.uint8(4)
    block_bytes = out.shape[1] // 2
    for block in range(out.shape[0]):
        scale, result = scales[block], out[block]
        part = data[block * block_bytes : (block + 1) * block_bytes]
        for j in range(part.size):
            result[2 * j] = values[part[j] >> shift] * scale
            result[2 * j + 1] = values[part[j] & low] * scale


@kernel
def scatter_pairs(kept: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
    """Write the kept values of a 2:4 sparse matrix to their columns, and 0 to the others.

    kept       float32 (n_rows, n_cols // 2)
    positions  uint8 (n_rows, n_cols // 2): which of its four columns a value stands in
    out        float32 (n_rows, n_cols)
    """
    zero = np.float32(0)
    for i in range(out.shape[0]):
        row, place, result = kept[i], positions[i], out[i]
        for j in range(result.size):
            result[j] = zero
        for k in range(row.size):
            result[(k >> 1) * 4 + place[k]] = row[k]


class Float8(NamedTuple):
    """An 8-bit float: 1 sign bit, then exponent and fraction.

    fraction_bits  bits of the fraction
    bias           of the exponent; an exponent of 0 makes a subnormal number
    largest        the largest code of a plain number, its sign off; what is above is infinite or NaN
    values         float32 (256,): the value of every code
    """

    fraction_bits: int
    bias: int
    largest: int
    values: np.ndarray


@kernel
def decode_blocks(
    codes: np.ndarray,
    float8: Float8,
    scales: np.ndarray,
    first_row: int,
    block_rows: int,
    block_cols: int,
    divides: bool,
    out: np.ndarray,
) -> None:
    """Write the value of each code times the scale of its block, or divided by it.

    codes      uint8 (n_rows * n_cols,)
    scales     float32 (n_block_rows, n_block_cols) of the blocks that these rows touch
    first_row  where in the first block row `codes` begins
    out        float32 (n_rows, n_cols)
    """
    n_rows, n_cols = out.shape
    flat = out.reshape(-1)
    for i in range(n_rows):
        block_row = (first_row + i) // block_rows
        for block_col in range((n_cols + block_cols - 1) // block_cols):
            start = i * n_cols + block_col * block_cols
            stop = i * n_cols + min((block_col + 1) * block_cols, n_cols)
            scale = scales[block_row, block_col]
            whole = stop - (stop - start) % LANES
            for k in range(start, whole, LANES):
                values = _values(codes, k, float8)
                if divides:
                    store(flat, k, values / scale)
                else:
                    store(flat, k, values * scale)
            for k in range(whole, stop):
                value = float8.values[codes[k]]
                flat[k] = value / scale if divides else value * scale


@inlinable
def _values(codes: np.ndarray, index: int, float8: Float8) -> Floats:
    """Return the values of codes[index : index + LANES].

    Exponent and fraction move to where float32 has them. Subnormal numbers are made of integers: as operands
    they would be slow.
    """
    code = load(codes, index)
    size = code & 0x7F
    normal = from_bits((size << 23 - float8.fraction_bits) + (127 - float8.bias << 23))
    least = from_bits(127 + 1 - float8.bias - float8.fraction_bits << 23)
    value = select(size < 1 << float8.fraction_bits, to_float(size) * least, normal)
    if any_lane((size > float8.largest) | (code == 0x80)):  # infinite, NaN, or -0, which some types have not
        return gather(float8.values, code)
    return from_bits(bits(value) | (code & 0x80) << 24)


@kernel
def decode_nibbles(
    codes: np.ndarray, values: np.ndarray, scales: np.ndarray, group_size: int, out: np.ndarray
) -> None:
    """Write values[code] * scale of its group; the lower half of a byte comes first.

    codes   uint8 (n_rows, n_cols / 2)
    values  float32 (16,)
    scales  float32 (n_rows, n_groups)
    out     float32 (n_rows, n_cols)
    """
    low, shift = np.uint8(15), np.uint8(4)
    for i in range(codes.shape[0]):
        for group in range(scales.shape[1]):
            scale = scales[i, group]
            start = group * group_size
            part = codes[i, start // 2 : (start + group_size) // 2]
            result = out[i, start : start + group_size]
            for j in range(part.size):
                result[2 * j] = values[part[j] & low] * scale
                result[2 * j + 1] = values[part[j] >> shift] * scale


@kernel
def multiply_rows(rows: np.ndarray, factor: np.float32) -> None:
    """Multiply float32 (n_rows, n_cols) in place."""
    for i in range(rows.shape[0]):
        row = rows[i]
        for j in range(row.size):
            row[j] *= factor


@kernel
def divide_rows(rows: np.ndarray, factor: np.float32) -> None:
    """Divide float32 (n_rows, n_cols) in place."""
    for i in range(rows.shape[0]):
        row = rows[i]
        for j in range(row.size):
            row[j] /= factor


@kernel
def pack_halves(codes: np.ndarray, half: int, out: np.ndarray) -> None:
    """Write pairs of codes from the two halves of a group, where pairs of neighbours are given.

    codes  uint8 (n_blocks, n_bytes): codes 2 * i and 2 * i + 1 of a group in byte i, the first one low
    half   codes in half a group, even
    out    uint8 (n_blocks, n_bytes): codes i and i + half of a group in byte i
    """
    low, shift = np.uint8(15), np.uint8(4)
    for block in range(codes.shape[0]):
        for start in range(0, codes.shape[1], half):
            lower = codes[block, start : start + half // 2]
            upper = codes[block, start + half // 2 : start + half]
            result = out[block, start : start + half]
            for i in range(lower.size):
                result[2 * i] = lower[i] & low | (upper[i] & low) << shift
                result[2 * i + 1] = lower[i] >> shift | upper[i] >> shift << shift
