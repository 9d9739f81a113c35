"""Corners of single formats that random rows don't find."""

from __future__ import annotations

import numpy as np
import pytest

from quantize.formats import get_format
from quantize.formats.iq import iq4_search
from tests import naive
from tests.naive.nonlinear import nearest_level
from tests.quantize.codecs import block_dtype, decode
from tests.support import oracle

needs_oracle = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")


def around(value: np.float32) -> list[np.float32]:
    return [np.nextafter(value, np.float32(-np.inf)), value, np.nextafter(value, np.float32(np.inf))]


def test_levels_of_iq4_change_at_the_edges() -> None:
    for k, edge in enumerate(iq4_search.EDGES):
        assert [nearest_level(value) for value in around(edge)] == [k, k + 1, k + 1]


def test_a_weight_meets_one_edge_of_iq4_at_most_in_all_trials() -> None:
    """The trials' inverse scales go from 134 to 120 over the largest magnitude."""
    for side in (iq4_search.EDGES[iq4_search.EDGES > 0], -iq4_search.EDGES[iq4_search.EDGES < 0]):
        edges = np.sort(side)
        assert (edges[1:] / edges[:-1]).min() > 1.2 > 134 / 120


def largest_magnitudes_of_mxfp4() -> np.ndarray:
    """Return float32 at and just below powers of two, where the rounded logarithm jumps, and subnormals."""
    powers = [
        (exponent << 23) - steps for exponent in range(1, 255, 3) for steps in (0, 1, 11, 22, 44, 45, 89)
    ]
    subnormals = [(1 << bit) - steps for bit in range(8, 23) for steps in (0, 1, 2, 3, 44, 45)]
    return np.array(powers + subnormals, np.uint32).view(np.float32)


def test_exponents_of_mxfp4_follow_the_rounded_logarithm() -> None:
    codec = get_format("MXFP4")
    largest = largest_magnitudes_of_mxfp4()
    shares = np.random.default_rng(0).uniform(-1, 1, (len(largest), 32)).astype(np.float32)
    shares[:, 7] = -1
    rows = shares * largest[:, None]
    ours = codec.make(rows, None)  # also of blocks that are refused
    np.testing.assert_array_equal(ours[:, 0], [naive.TWINS["MXFP4"].encode(row, None)[0] for row in rows])
    if oracle.available():
        np.testing.assert_array_equal(ours, oracle.quantize(codec.type.id, rows, None))


@needs_oracle
@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_ties_and_overflows_of_4_bit_floats(name: str) -> None:
    codec = get_format(name)
    n_cols = codec.type.block_elems
    rng = np.random.default_rng(1)
    parts = rng.integers(-64, 65, (400, n_cols)) / 16  # sixteenths: many ties
    exponents = rng.integers(-140, 126, (400, 1)).astype(np.float64)
    rows = np.concatenate([parts * 2**exponents, parts * rng.choice([1e-3, 1, 600, 3000, 1e9], (400, 1))])
    rows = rows.astype(np.float32)
    ours = codec.make(rows, None)  # also of blocks that are refused
    np.testing.assert_array_equal(ours, oracle.quantize(codec.type.id, rows, None))


@needs_oracle
@pytest.mark.parametrize("name", ["TQ1_0", "NVFP4", "MXFP4", "IQ4_XS"])
def test_every_byte_decodes_as_ggml_decodes_it(name: str) -> None:
    codec = get_format(name)
    blocks = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, codec.type.block_bytes))
    block = block_dtype(name)
    for field in block.names or ():
        if block[field] == np.dtype("<u2"):
            blocks.view(block)[field] = 0x3C00
    ours = decode(name, blocks)
    theirs = oracle.dequantize(codec.type.id, blocks)
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
