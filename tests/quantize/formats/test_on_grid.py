"""Q4_0 for weights on a grid: every code is found again."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gguf_tools.format.ggml_types import Q4_0
from quantize.formats.base import BlockRefused
from quantize.formats.blocks_of_32.on_grid import encode_on_grid
from tests.quantize.codecs import decode, encode

N_ROWS, N_COLS = 40, 96


def on_grid(largest: int, seed: int = 0) -> np.ndarray:
    """Return codes of -largest .. min(largest, 7) times float16 scales of many sizes, float32."""
    random = np.random.default_rng(seed)
    codes = random.integers(-largest, min(largest, 7), (N_ROWS, N_COLS // 32, 32), endpoint=True)
    scales = np.exp2(random.uniform(-14, 8, (N_ROWS, N_COLS // 32, 1))).astype(np.float16)
    return (codes * scales.astype(np.float32)).reshape(N_ROWS, N_COLS).astype(np.float32)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("largest", range(9))
def test_every_weight_is_met(largest: int, sign: int) -> None:
    """With any largest code; -8 on either side, where the scale is negative on one."""
    rows = sign * on_grid(largest)
    np.testing.assert_array_equal(decode(Q4_0, encode_on_grid(rows)), rows)


def test_the_reference_misses_them() -> None:
    rows = on_grid(7)
    assert np.abs(decode(Q4_0, encode(Q4_0, rows, None)) - rows).max() > 0


def test_scales_in_bfloat16() -> None:
    """Those of compressed-tensors: eight bits, which a float16 has where it is no subnormal number."""
    random = np.random.default_rng(1)
    codes = random.integers(-8, 7, (N_ROWS, N_COLS), endpoint=True).reshape(N_ROWS, -1, 32)
    scales = (0.02 * random.random((N_ROWS, N_COLS // 32, 1)) + 1e-4).astype(ml_dtypes.bfloat16)
    rows = (codes * scales.astype(np.float32)).reshape(N_ROWS, N_COLS).astype(np.float32)
    np.testing.assert_array_equal(decode(Q4_0, encode_on_grid(rows)), rows)


def test_products_rounded_to_bfloat16_have_their_codes() -> None:
    rows = on_grid(8, seed=2)
    values = decode(Q4_0, encode_on_grid(rows.astype(ml_dtypes.bfloat16)))
    np.testing.assert_allclose(values, rows, rtol=2.0**-8)
    np.testing.assert_array_equal(values == 0, rows == 0)


def test_other_weights_err_no_more_than_the_reference() -> None:
    rows = np.random.default_rng(3).standard_normal((N_ROWS, N_COLS)).astype(np.float32)
    ours, reference = (np.square(decode(Q4_0, data) - rows).reshape(-1, 32).sum(1)
                       for data in (encode_on_grid(rows), encode(Q4_0, rows, None)))  # fmt: skip
    assert (ours <= reference * (1 + 1e-5)).all()


def test_a_weight_that_is_no_number() -> None:
    rows = on_grid(7)
    rows[3, 40] = np.nan
    with pytest.raises(BlockRefused):
        encode_on_grid(rows)
