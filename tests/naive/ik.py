"""Twins of the decoders of ik_llama.cpp's own types: one weight at a time, each from its own bits.

A function takes the bytes of a row, uint8, and returns the row, float32. The layouts are in the docstrings of
quantize/formats/ik.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.naive.floats import f32, from_half

Row = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_FOUR = [[-31, -13, 1, 17], [-26, -8, 6, 22]]
_EIGHT = [[-63, -40, -23, -10, 1, 13, 28, 47], [-59, -36, -19, -6, 5, 17, 32, 51]]
_SIXTEEN = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def _bits(data: Bytes, first: int, count: int) -> int:
    """Return `count` bits of `data` from bit `first` on, the lowest bit of each byte first."""
    number = int.from_bytes(data[first // 8 : (first + count + 7) // 8].tobytes(), "little")
    return number >> first % 8 & (1 << count) - 1


def _half(data: Bytes) -> f32:
    return from_half(_bits(data, 0, 16))


def _single(data: Bytes) -> f32:
    return f32(data[:4].view("<f4")[0])


def _sixteen(second: int, code: int) -> int:
    return _SIXTEEN[code] + 4 * second


def dequantize_q6_0(data: Bytes) -> Row:
    row = []
    for block in data.reshape(-1, 26):
        for i in range(32):
            low = _bits(block[10:], 8 * (i % 16) + 4 * (i // 16), 4)
            high = _bits(block[2:], 8 * (i % 8) + 4 * (i // 8 % 2) + 2 * (i // 16), 2)
            row.append(_half(block) * f32((low | high << 4) - 32))
    return np.array(row)


def dequantize_iq2_k(data: Bytes) -> Row:
    row = []
    for block in data.reshape(-1, 76):
        for i in range(256):
            code = _bits(block[12:], 8 * (i // 128 * 32 + i % 32) + 2 * (i // 32 % 4), 2)
            scale = _half(block) * f32(_bits(block[4:], 4 * (i // 16), 4) - 8)
            row.append(scale * f32(_FOUR[_bits(block[2:], i // 16, 1)][code]))
    return np.array(row)


def dequantize_iq3_k(data: Bytes) -> Row:
    row = []
    for block in data.reshape(-1, 110):
        for i in range(256):
            low = _bits(block[14:], 8 * (i // 128 * 32 + i % 32) + 2 * (i // 32 % 4), 2)
            high = _bits(block[78:], 8 * (i % 32) + i // 32, 1)
            sign = -1 if _bits(block[4:], i // 16, 1) else 1
            scale = _half(block) * f32(sign * (2 * _bits(block[6:], 4 * (i // 16), 4) + 1))
            row.append(scale * f32(_EIGHT[_bits(block[2:], i // 16, 1)][low | high << 2]))
    return np.array(row)


def dequantize_iq4_k(data: Bytes) -> Row:
    row = []
    for block in data.reshape(-1, 144):
        for i in range(256):
            code = _bits(block[16:], 8 * (i // 32 * 16 + i % 16) + 4 * (i // 16 % 2), 4)
            scale_code = _bits(block[8:], 4 * (i // 16), 4) | _bits(block[4:], 2 * (i // 16), 2) << 4
            scale = _half(block) * f32(scale_code - 32)
            row.append(scale * f32(_sixteen(_bits(block[2:], i // 16, 1), code)))
    return np.array(row)


def dequantize_iq2_ks(data: Bytes) -> Row:
    row = []
    for block in data[2:].reshape(-1, 70):
        for i in range(256):
            code = _bits(block[6:], 8 * (i // 128 * 32 + i % 32) + 2 * (i // 32 % 4), 2)
            scale_code = _bits(block[2:], 4 * (i // 32), 4) | _bits(block, 8 + i // 32, 1) << 4
            row.append(_half(data) * f32(scale_code - 16) * f32(_FOUR[_bits(block, i // 32, 1)][code]))
    return np.array(row)


def dequantize_iq4_ks(data: Bytes) -> Row:
    row = []
    for block in data[4:].reshape(-1, 136):
        for i in range(256):
            code = _bits(block[8:], 8 * (i // 32 * 16 + i % 16) + 4 * (i // 16 % 2), 4)
            own = int(block[i // 32])
            scale = _single(data) * f32(own - own % 2 - 127)
            row.append(scale * f32(_sixteen(own % 2, code)))
    return np.array(row)


def dequantize_iq4_kss(data: Bytes) -> Row:
    row = []
    for block in data[4:].reshape(-1, 16):
        words = [int(word) for word in block.view("<u2")]
        own = sum((word & 1) << k for k, word in enumerate(words))
        codes = [(word & 0xFFFE) ^ (word & 0xFFFE) >> 1 for word in words]
        for i in range(32):
            code = codes[i % 16 // 2] >> 8 * (i % 2) + 4 * (i // 16) & 0xF
            row.append(_single(data) * f32(own - own % 2 - 127) * f32(_sixteen(own % 2, code)))
    return np.array(row)


def _walk(number: int, steps: int) -> int:
    """Return the level that so many steps of the generator lead to."""
    for _ in range(steps):
        number = number * 0xCBAC1FED % 2**32
    return sum(number >> shift & 0x3F for shift in (0, 8, 16, 24)) - 126


def dequantize_iq3_kt(data: Bytes) -> Row:
    row = []
    for block in data[4:].reshape(-1, 100):
        for i in range(256):
            scale = _single(data) * f32(_bits(block, 8 * (i // 32 % 4) + 4 * (i // 128), 4))
            magnitude = scale * f32(abs(_walk(_bits(block[4:], 16 * (i // 8), 16) + 4096, i % 8 + 1)))
            row.append(-magnitude if _bits(block[68:], 8 * (i % 32) + i // 32, 1) else magnitude)
    return np.array(row)


def dequantize_iq4_kt(data: Bytes) -> Row:
    row = []
    for block in data[4:].reshape(-1, 128):
        for i in range(256):
            word, group = block[4 * (i // 32) :], i // 4
            index = _bits(block[32:], 8 * group, 8)
            index |= _bits(block[96:], 8 * (group % 32) + 4 * (group // 32), 4) << 8
            index |= _bits(word, 8 + 3 * (group % 8), 3) << 12
            start = index + (36864 if _bits(word, 0, 1) else 4096)
            row.append(_single(data) * f32(_bits(word, 1, 7) - 64) * f32(_walk(start, i % 4 + 1)))
    return np.array(row)


# ---- interleaved types: the bytes of a group, and its rows


def dequantize_q8_k_r8(data: Bytes) -> Row:
    rows: list[list[f32]] = [[] for _ in range(8)]
    for block in data.reshape(-1, 2064):
        for k in range(8):
            for i in range(256):
                code = int(block[16 + 32 * (i // 4) + 4 * k + i % 4].view(np.int8))
                rows[k].append(_half(block[2 * k :]) * f32(code))
    return np.array(rows)


def dequantize_q3_k_r4(data: Bytes) -> Row:
    rows: list[list[f32]] = [[] for _ in range(4)]
    for block in data.reshape(-1, 440):
        for k in range(4):
            for i in range(256):
                part, place, number = i // 32, 4 * k + i % 4, 4 * (i // 16) + k
                scale_code = _bits(block[24:], 8 * (number % 32) + 4 * (number // 32), 4)
                scale_code |= _bits(block[8:], 8 * (number % 16) + 2 * (number // 16), 2) << 4
                code = _bits(block[184:], 8 * (32 * part + 16 * (i // 16 % 2) + place) + 2 * (i // 4 % 4), 2)
                code |= _bits(block[56:], 8 * (16 * part + place) + i // 4 % 8, 1) << 2
                rows[k].append(_half(block[2 * k :]) * f32(scale_code - 32) * f32(code - 4))
    return np.array(rows)


def dequantize_iq4_ks_r4(data: Bytes) -> Row:
    rows: list[list[f32]] = [[] for _ in range(4)]
    for block in data[16:].reshape(-1, 544):
        for k in range(4):
            for i in range(256):
                own = int(block[4 * (i // 32) + k])
                quarter = 32 * (i // 4 % 2) + 16 * (i // 16 % 2)
                code = _bits(block[32:], 8 * (64 * (i // 32) + quarter + 4 * k + i % 4) + 4 * (i // 8 % 2), 4)
                scale = _single(data[4 * k :]) * f32(own - own % 2 - 127)
                rows[k].append(scale * f32(_sixteen(own % 2, code)))
    return np.array(rows)
