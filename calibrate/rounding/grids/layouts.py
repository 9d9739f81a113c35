"""Where the grid types keep indices, signs and scales: blocks as arrays, and back.

Each type's module under quantize.formats.iq has the layout of its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, GGMLType
from quantize.formats.base import Bytes, Floats32
from quantize.formats.iq import iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs
from quantize.formats.iq.iq2 import with_even_signs
from quantize.simd.floats import halves_to_float32

Array = npt.NDArray[Any]

Block = np.dtype[Any]

Path = tuple[str, ...]
"""Names of fields, each in the one before it."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """n blocks of 256 weights.

    d        float32 (n,), float16 numbers: the scale of the scales
    scales   int64 (n, 8 or 16), integer scales of sub-blocks
    indices  int64 (n, 32 or 64), of the grid points of groups of 8 or 4
    signs    uint8 (n, 32): bit i of byte k is set where weight 8 * k + i is negative; of IQ1 0xFF where the
             shift of group k is -1/8, and else 0
    """

    d: Floats32
    scales: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    signs: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Layout:
    """The two directions of a type.

    read   uint8 (n, bytes of a block) to blocks
    write  the inverse
    """

    type: GGMLType
    read: Callable[[Bytes], Blocks]
    write: Callable[[Blocks], Bytes]


def _blocks(data: Bytes, block: Block) -> Array:
    return np.ascontiguousarray(data).view(block)[:, 0]


def _at(blocks: Array, path: Path) -> Array:
    """Show a field of blocks, to read or to write."""
    for name in path:
        blocks = blocks[name]
    return blocks


def _bytes(blocks: Array) -> Bytes:
    return blocks.view(np.uint8).reshape(len(blocks), -1)


def _fields(d: Array, scales: Array, indices: Array, signs: Array) -> Blocks:
    n = len(d)
    return Blocks(
        halves_to_float32(d.astype(np.uint16)),
        scales.reshape(n, -1).astype(np.int64),
        indices.reshape(n, -1).astype(np.int64),
        signs.reshape(n, -1).astype(np.uint8),
    )


def _halves(d: Floats32) -> npt.NDArray[np.uint16]:
    return d.astype(np.float16).view(np.uint16)


def _nibbles(packed: Array) -> Array:
    """Split each byte in halves, the lower one first: (n, 2 * bytes)."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _to_nibbles(codes: Array) -> Array:
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _bits(values: Array, width: int, count: int) -> Array:
    """Take `count` numbers of `width` bits out of each value, the lowest first: one more axis."""
    return values[..., None].astype(np.int64) >> width * np.arange(count) & (1 << width) - 1


def _to_bits(numbers: Array, width: int) -> Array:
    """Put the numbers of the last axis side by side in one, the first one lowest: int64."""
    return (numbers.astype(np.int64) << width * np.arange(numbers.shape[-1])).sum(axis=-1)


# ---- IQ2 and IQ3


def _with_packed_signs(type_: GGMLType, block: Block, indices: Path, words: Path) -> Layout:
    """The layout of IQ2_XXS and IQ3_XXS: 32 bits for 32 weights, seven signs of each eight and the scale.

    indices  where the indices are in a block
    words    where the 32 bits are
    """

    def read(data: Bytes) -> Blocks:
        blocks = _blocks(data, block)
        bits = _at(blocks, words)
        return _fields(blocks["d"], bits >> 28, _at(blocks, indices), with_even_signs(_bits(bits, 7, 4)))

    def write(parts: Blocks) -> Bytes:
        blocks = np.empty(len(parts.d), block)
        blocks["d"] = _halves(parts.d)
        to = _at(blocks, indices)
        to[...] = parts.indices.reshape(to.shape)
        _at(blocks, words)[...] = _to_bits(parts.signs.reshape(-1, 8, 4) & 127, 7) | parts.scales << 28
        return _bytes(blocks)

    return Layout(type_, read, write)


def _with_whole_signs(type_: GGMLType, block: Block, width: int) -> Layout:
    """The layout of IQ2_S and IQ3_S: eight signs of each eight weights, and `width` high bits of an index."""
    count = 8 // width

    def read(data: Bytes) -> Blocks:
        blocks = _blocks(data, block)
        high = _bits(blocks["qh"], width, count).reshape(blocks["qs"].shape)
        return _fields(blocks["d"], _nibbles(blocks["scales"]), blocks["qs"] | high << 8, blocks["signs"])

    def write(parts: Blocks) -> Bytes:
        blocks = np.empty(len(parts.d), block)
        blocks["d"] = _halves(parts.d)
        blocks["qs"] = parts.indices & 255
        blocks["qh"] = _to_bits(parts.indices.reshape(-1, 8, count) >> 8, width)
        blocks["signs"] = parts.signs
        blocks["scales"] = _to_nibbles(parts.scales)
        return _bytes(blocks)

    return Layout(type_, read, write)


def _read_iq2_xs(data: Bytes) -> Blocks:
    blocks = _blocks(data, iq2_xs.BLOCK)
    signs = with_even_signs(blocks["qs"] >> 9)
    return _fields(blocks["d"], _nibbles(blocks["scales"]), blocks["qs"] & 511, signs)


def _write_iq2_xs(parts: Blocks) -> Bytes:
    blocks = np.empty(len(parts.d), iq2_xs.BLOCK)
    blocks["d"] = _halves(parts.d)
    blocks["qs"] = parts.indices | (parts.signs & 127).astype(np.int64) << 9
    blocks["scales"] = _to_nibbles(parts.scales)
    return _bytes(blocks)


# ---- IQ1


def _read_iq1_s(data: Bytes) -> Blocks:
    blocks = _blocks(data, iq1_s.BLOCK)
    indices = blocks["qs"] | _bits(blocks["qh"], 3, 4).reshape(-1, 32) << 8
    shifts = np.repeat(blocks["qh"] >> 15, 4, axis=1) * 255
    return _fields(blocks["d"], blocks["qh"] >> 12 & 7, indices, shifts)


def _write_iq1_s(parts: Blocks) -> Bytes:
    blocks = np.empty(len(parts.d), iq1_s.BLOCK)
    blocks["d"] = _halves(parts.d)
    blocks["qs"] = parts.indices & 255
    shifts = parts.signs[:, ::4].astype(np.int64) & 1
    blocks["qh"] = _to_bits(parts.indices.reshape(-1, 8, 4) >> 8, 3) | parts.scales << 12 | shifts << 15
    return _bytes(blocks)


def _read_iq1_m(data: Bytes) -> Blocks:
    blocks = _blocks(data, iq1_m.BLOCK)
    high = _nibbles(blocks["qh"])
    indices = blocks["qs"] | (high & 7).astype(np.int64) << 8
    d = _to_bits(blocks["scales"] >> 12, 4)
    return _fields(d, _bits(blocks["scales"], 3, 4), indices, (high >> 3) * 255)


def _write_iq1_m(parts: Blocks) -> Bytes:
    n = len(parts.d)
    blocks = np.empty(n, iq1_m.BLOCK)
    blocks["qs"] = parts.indices & 255
    blocks["qh"] = _to_nibbles(parts.indices >> 8 | (parts.signs & 1).astype(np.int64) << 3)
    blocks["scales"] = _to_bits(parts.scales.reshape(n, 4, 4), 3) | _bits(_halves(parts.d), 4, 4) << 12
    return _bytes(blocks)


LAYOUTS = {
    layout.type.name: layout
    for layout in (
        _with_packed_signs(IQ2_XXS, iq2_xxs.BLOCK, ("qs", "indices"), ("qs", "signs_scale")),
        Layout(IQ2_XS, _read_iq2_xs, _write_iq2_xs),
        _with_whole_signs(IQ2_S, iq2_s.BLOCK, 2),
        _with_packed_signs(IQ3_XXS, iq3_xxs.BLOCK, ("qs",), ("words",)),
        _with_whole_signs(IQ3_S, iq3_s.BLOCK, 1),
        Layout(IQ1_S, _read_iq1_s, _write_iq1_s),
        Layout(IQ1_M, _read_iq1_m, _write_iq1_m),
    )
}
"""The layouts by the name of the type."""
