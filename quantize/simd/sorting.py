"""Sorting in lanes. Each lane sorts its own list; all follow one fixed sequence of exchanges.

A network after Batcher (merges of odd and even halves) compares the same places whatever they hold, so lanes
need no branches. It is not stable by itself; here the place that an element came from decides between equals.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from quantize.simd.kernel import inlinable
from quantize.simd.lane_memory import FloatTile, IntTile
from quantize.simd.lanes import select, splat


def exchanges(size: int) -> npt.NDArray[np.int64]:
    """Return the pairs of places, (n, 2), that a network for `size` items, a power of 2, compares in turn."""
    return np.array(list(_sort(0, size)), np.int64)


def _sort(start: int, size: int) -> Iterator[tuple[int, int]]:
    if size > 1:
        yield from _sort(start, size // 2)
        yield from _sort(start + size // 2, size // 2)
        yield from _merge(start, size, 1)


def _merge(start: int, size: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield what merges two sorted halves of the places start, start + step .. below start + size."""
    if 2 * step < size:
        yield from _merge(start, size, 2 * step)
        yield from _merge(start + step, size, 2 * step)
        for place in range(start + step, start + size - step, 2 * step):
            yield place, place + step
    else:
        yield start, start + step


_OF_16 = exchanges(16)
_OF_32 = exchanges(32)


@inlinable
def sort_16(keys: FloatTile, order: IntTile, carried: FloatTile) -> None:
    """Sort 16 Floats ascending, in place; equals stay in order. See `_run`."""
    _run(_OF_16, 16, keys, order, carried)


@inlinable
def sort_32(keys: FloatTile, order: IntTile, carried: FloatTile) -> None:
    """Sort 32 Floats ascending, in place; equals stay in order. See `_run`."""
    _run(_OF_32, 32, keys, order, carried)


@inlinable
def _run(
    network: npt.NDArray[np.int64], size: int, keys: FloatTile, order: IntTile, carried: FloatTile
) -> None:
    """Run a network.

    keys     Floats, no NaN; 0 and -0 are equals
    order    Ints, filled with where each key came from
    carried  Floats that move with their keys
    """
    for i in range(size):
        order[i] = splat(i)
    for k in range(len(network)):
        i, j = network[k, 0], network[k, 1]
        key_i, key_j, order_i, order_j, carried_i, carried_j = (
            keys[i],
            keys[j],
            order[i],
            order[j],
            carried[i],
            carried[j],
        )
        wrong = (key_i > key_j) | ((key_i == key_j) & (order_i > order_j))
        keys[i], keys[j] = select(wrong, key_j, key_i), select(wrong, key_i, key_j)
        order[i], order[j] = select(wrong, order_j, order_i), select(wrong, order_i, order_j)
        carried[i], carried[j] = select(wrong, carried_j, carried_i), select(wrong, carried_i, carried_j)
