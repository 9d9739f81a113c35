"""Packing of codes into words, and unpacking, as K-quants lay 2 to 6 bits out in a block.

Packing works on Tiles of Ints (lane = block) and gives words for `tiles.store_blocks`. Unpacking reads
LANES codes of one block from bytes (`codes_at`), or all of an array's outside of kernels (`unpack`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import IntTile, load
from quantize.simd.lanes import Ints, shift_right_logical, splat


@inlinable
def pack(codes: IntTile, shift: int, bits: int, group_bytes: int, n_bytes: int, words: IntTile) -> None:
    """Fill n_bytes of words with bits shift .. shift + bits - 1 of the codes.

    In each group of `group_bytes` bytes, a multiple of 4, the lowest bits of all bytes hold the first
    `group_bytes` codes, the next bits the next ones.
    """
    per_byte = 8 // bits
    for group in range(n_bytes // group_bytes):
        for word in range(group_bytes // 4):
            packed = splat(0)
            for part_ in range(per_byte):
                start = (group * per_byte + part_) * group_bytes + 4 * word
                for byte in range(4):
                    code = codes[start + byte] >> shift & (1 << bits) - 1
                    packed |= code << 8 * byte + bits * part_
            words[group * group_bytes // 4 + word] = packed


def unpack(packed: npt.NDArray[np.uint8], bits: int, group_bytes: int) -> npt.NDArray[np.uint8]:
    """Return the codes, uint8 (n_blocks, n_codes), that `pack` put into bytes (n_blocks, n_bytes)."""
    n_blocks, n_bytes = packed.shape
    groups = packed.reshape(n_blocks, n_bytes // group_bytes, 1, group_bytes)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    parts: npt.NDArray[np.uint8] = (groups >> shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(n_blocks, n_bytes * 8 // bits)


@inlinable
def codes_at(data: npt.NDArray[np.uint8], offset: int, first: int, bits: int, group_bytes: int) -> Ints:
    """Return codes first .. first + LANES - 1 of the bytes of `pack` that begin at data[offset].

    first and group_bytes are multiples of LANES.
    """
    per_group = 8 // bits * group_bytes
    byte = first // per_group * group_bytes + first % group_bytes
    shift = first % per_group // group_bytes * bits
    return load(data, offset + byte) >> shift & (1 << bits) - 1


@inlinable
def pack_scales(scales: IntTile, minimums: IntTile, words: IntTile) -> None:
    """Fill 3 words with 8 scales and 8 minimums, bytes of which 6 bits are kept; ggml's get_scale_min_k4.

    bytes 0 .. 3   scales 0 .. 3 | upper 2 bits of scales 4 .. 7, shifted left by 6
    bytes 4 .. 7   the same of the minimums
    bytes 8 .. 11  lower 4 bits of scales 4 .. 7 | lower 4 bits of minimums 4 .. 7, shifted left by 4
    """
    for k in range(3):
        words[k] = splat(0)
    for j in range(4):
        scale, minimum = scales[j + 4], minimums[j + 4]
        words[0] = words[0] | ((scales[j] | scale >> 4 << 6) & 0xFF) << 8 * j
        words[1] = words[1] | ((minimums[j] | minimum >> 4 << 6) & 0xFF) << 8 * j
        words[2] = words[2] | (scale & 0xF | (minimum & 0xF) << 4) << 8 * j


@inlinable
def unpack_scale(words: IntTile, field: int, j: int) -> Ints:
    """Return scale j (field 0) or minimum j (field 1) as a reader finds it in the words of `pack_scales`."""
    if j < 4:
        return words[field] >> 8 * j & 63
    upper = words[field] >> 8 * (j - 4) + 6 & 3
    return words[2] >> 8 * (j - 4) + 4 * field & 0xF | upper << 4


@inlinable
def scale_at(data: npt.NDArray[np.uint8], offset: int, field: int, j: int) -> np.float32:
    """Return scale j (field 0) or minimum j (field 1) of the 12 bytes of `pack_scales` at data[offset]."""
    if j < 4:
        return np.float32(data[offset + 4 * field + j] & 63)
    upper = data[offset + 4 * field + j - 4] >> 6
    return np.float32(data[offset + 4 + j] >> 4 * field & 0xF | upper << 4)


@inlinable
def prepend_half(half: Ints, words: IntTile, count: int) -> None:
    """Put 16 bits before the bytes of words[0] .. words[count - 1], which end in words[count] then."""
    words[count] = shift_right_logical(words[count - 1], 16)
    for k in range(count - 1, 0, -1):
        words[k] = words[k] << 16 | shift_right_logical(words[k - 1], 16)
    words[0] = words[0] << 16 | half
