"""8-bit floats as vectors: every code of every type, next to every other kind of code."""

from __future__ import annotations

import numpy as np
import pytest

from convert.weights.kernels import Float8, decode_blocks
from convert.weights.schemes.fp8 import CODE_VALUES, FACTS


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("encoding", FACTS)
@pytest.mark.parametrize("n_cols", [1, 15, 16, 100, 256])
def test_codes_decode_as_their_table_says(encoding: str, n_cols: int, divides: bool) -> None:
    rng = np.random.default_rng(n_cols)
    n_rows, block_rows, block_cols = 70, 32, 48
    codes = rng.integers(0, 256, (n_rows, n_cols), np.uint8)
    some = np.resize(np.arange(256, dtype=np.uint8), codes.size)
    codes[::2] = some.reshape(codes.shape)[::2]
    scales = rng.random((4, -(-n_cols // block_cols)), np.float32) + np.float32(0.5)
    values = CODE_VALUES[encoding]
    out = np.empty((n_rows, n_cols), np.float32)
    float8 = Float8(*FACTS[encoding], values)
    decode_blocks(codes.reshape(-1), float8, scales, 5, block_rows, block_cols, divides, out)
    of_rows, of_cols = (5 + np.arange(n_rows)) // block_rows, np.arange(n_cols) // block_cols
    scale = scales[of_rows[:, None], of_cols]
    expected = values[codes] / scale if divides else values[codes] * scale
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
