"""The frame of a kernel that encodes blocks: LANES of them are loaded, encoded side by side, and stored.

A format says what happens to one block, and a decorator makes the kernel of `base.encode_blocks` of it:

    plain_kernel(type)     encode(x, words)
    weighted_kernel(type)  encode(x, weights, words)

    x        Tile of Floats, the weights of the block, all finite
    weights  Tile of Floats, their importances; encode may change both
    words    Tile of Ints, to be filled with the bytes of the block, as tiles.py has them

The kernel has the name and the module of `encode`, and calls it once for LANES blocks. Types with grids have
such decorators in iq/grid_blocks.py, types weighted by their rows one in blocks_of_32/scales.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.simd.kernel import inlinable, kernel_of
from quantize.simd.lane_memory import float_tile, int_tile
from quantize.simd.lanes import LANES
from quantize.simd.tiles import first_not_finite, load_blocks, load_importances, padded_words, store_blocks

Encode = Callable[..., Any]
Kernel = Callable[..., int]


def plain_kernel(
    type_: GGMLType, compiled: Callable[[Encode], Encode] = inlinable
) -> Callable[[Encode], Kernel]:
    """Return the decorator that makes a kernel, called as kernel(source, out), of encode(x, words).

    compiled  makes encode a function of kernels: `inlinable`, or `inlined`
    """
    n_elems, n_bytes, n_words = type_.block_elems, type_.block_bytes, padded_words(type_.block_bytes)

    def made_of(encode: Encode) -> Kernel:
        encode_tile = compiled(encode)

        def quantize(source: Rows, out: Bytes) -> int:
            x, words = float_tile(n_elems), int_tile(n_words)
            n_blocks = out.size // n_bytes
            for first in range(0, n_blocks, LANES):
                if not load_blocks(source, first, n_elems, x):
                    return first_not_finite(x, n_elems, first, n_blocks)
                encode_tile(x, words)
                store_blocks(words, out, first, n_bytes)
            return -1

        return kernel_of(encode, quantize)

    return made_of


def weighted_kernel(type_: GGMLType) -> Callable[[Encode], Kernel]:
    """Return the decorator that makes a kernel of encode(x, weights, words).

    The kernel is called as kernel(source, importances, out).
    """
    n_elems, n_bytes, n_words = type_.block_elems, type_.block_bytes, padded_words(type_.block_bytes)

    def made_of(encode: Encode) -> Kernel:
        encode_tile = inlinable(encode)

        def quantize(source: Rows, importances: Floats32, out: Bytes) -> int:
            x, weights, words = float_tile(n_elems), float_tile(n_elems), int_tile(n_words)
            n_blocks = out.size // n_bytes
            for first in range(0, n_blocks, LANES):
                if not load_blocks(source, first, n_elems, x):
                    return first_not_finite(x, n_elems, first, n_blocks)
                load_importances(importances, first, n_elems, weights)
                encode_tile(x, weights, words)
                store_blocks(words, out, first, n_bytes)
            return -1

        return kernel_of(encode, quantize)

    return made_of
