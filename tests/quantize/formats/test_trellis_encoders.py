"""Encoders of the trellis types: how near their search comes to trying every index, and its tree."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import numpy as np
import numpy.typing as npt
import pytest

from quantize.formats.codecs import CODECS
from quantize.formats.ik.trellis.rows import Trellis
from quantize.formats.ik.trellis.trellis import START, walks
from quantize.simd.lanes import LANES
from tests.quantize.codecs import decode, encode
from tests.support import samples

TRELLISES: dict[str, Trellis] = {
    name: getattr(import_module(CODECS[name].module, "quantize.formats"), f"_{name}_TRELLIS")
    for name in CODECS
    if name.endswith("_KT")
}

every_trellis = pytest.mark.parametrize("name", TRELLISES)

LARGEST_EXCESS = {"IQ1_KT": 0.03, "IQ2_KT": 0.04, "IQ3_KT": 0.03, "IQ4_KT": 0.08}
"""How much more may be lost than by the best index of each group, at the scales in the file: about twice what
these rows lose."""


def stored_scales(name: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Return the scales of the sub-blocks of 32, (n_rows, n_sub_blocks), as they are stored."""
    trellis = TRELLISES[name]
    d = data[:, :4].copy().view("<f4").astype(np.float64)
    blocks = data[:, 4:].reshape(len(data), -1, trellis.type.block_bytes)
    if name == "IQ1_KT":
        codes = blocks[:, :, :8] & 0xF
    elif name == "IQ4_KT":
        codes = blocks[:, :, :32:4] >> 1
    else:
        codes = np.concatenate([blocks[:, :, :4] & 0xF, blocks[:, :, :4] >> 4], axis=2)
    return d * trellis.levels[codes].reshape(len(data), -1)


def stored_starts(name: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return the number of the start of each sub-block, (n_rows, n_sub_blocks)."""
    trellis = TRELLISES[name]
    blocks = data[:, 4:].reshape(len(data), -1, trellis.type.block_bytes)
    first_bits = blocks[:, :, :32:4].astype(np.int64) & 1
    return (first_bits if len(trellis.starts) > 1 else 0 * first_bits).reshape(len(data), -1)


@every_trellis
def test_no_index_is_much_better_than_those_found(name: str) -> None:
    trellis = TRELLISES[name]
    rows = samples.rows("normal", (2, 256), seed=5)
    weights = samples.importances("random", 256, seed=5)
    data = encode(name, rows, weights)
    lost = weights * (rows.astype(np.float64) - decode(name, data)) ** 2
    points = [walks(start, 1 << trellis.bits, trellis.dim) for start in trellis.starts]
    wanted = np.abs(rows) if trellis.magnitudes else rows
    costs = np.tile(weights, len(rows)).reshape(-1, trellis.dim)
    scales = np.repeat(stored_scales(name, data).reshape(-1), 32 // trellis.dim)
    starts = np.repeat(stored_starts(name, data).reshape(-1), 32 // trellis.dim)
    best = 0.0
    for group, cost, scale, start in zip(wanted.reshape(-1, trellis.dim), costs, scales, starts, strict=True):
        levels = np.abs(points[start]) if trellis.magnitudes else points[start]
        best += ((group - scale * levels) ** 2 @ cost.astype(np.float64)).min()
    assert 0.999 * best <= lost.sum() <= (1 + LARGEST_EXCESS[name]) * best


@every_trellis
def test_a_tree_holds_every_point_once_and_in_its_boxes(name: str) -> None:
    trellis = TRELLISES[name]
    tree = trellis.tree()
    fours, count = trellis.dim // 4, 1 << trellis.bits
    stored = (
        tree.points.view(np.int8).reshape(-1, fours, LANES, 4).transpose(0, 2, 1, 3).reshape(-1, trellis.dim)
    )
    for k, start in enumerate(trellis.starts):
        numbers = tree.numbers[k * count : (k + 1) * count]
        np.testing.assert_array_equal(np.sort(numbers), np.arange(count))
        levels = walks(start, count, trellis.dim)[numbers]
        expected = np.abs(levels) if trellis.magnitudes else levels
        np.testing.assert_array_equal(stored[k * count : (k + 1) * count], expected)
    for boxes, size in ((tree.leaf_boxes, LANES), (tree.node_boxes, LANES**2)):
        ends = boxes.view(np.uint8).reshape(-1, fours, 2, LANES, 4).transpose(2, 0, 3, 1, 4)
        low, high = ends.reshape(2, -1, 1, trellis.dim)
        inside = (stored.reshape(-1, size, trellis.dim).astype(np.int64) + 128) >> 1
        assert (low == inside.min(axis=1, keepdims=True)).all()
        assert (high == inside.max(axis=1, keepdims=True)).all()


def test_walks_are_those_of_the_decoder() -> None:
    data = np.zeros((1, 4 + 68), np.uint8)
    data[0, :4] = np.array([1], "<f4").view(np.uint8)
    data[0, 4:8] = 0x88  # the level 1
    data[0, 8:].view("<u2")[:] = np.arange(32) * 2047
    expected = walks(START, 1 << 16, 8)[np.arange(32) * 2047]
    np.testing.assert_array_equal(decode("IQ2_KT", data)[0], expected.reshape(-1))


@every_trellis
def test_threads_make_the_same_bytes(name: str) -> None:
    rows = samples.rows("normal", (24, 256), seed=9)
    weights = samples.importances("random", 256, seed=9)
    whole = encode(name, rows, weights)
    with ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(lambda part: encode(name, part, weights), np.split(rows, 8)))
    np.testing.assert_array_equal(np.concatenate(parts), whole)
