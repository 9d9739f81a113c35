from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gguf_tools.errors import BadWeights
from quantize.fill.encode import check_finite
from quantize.formats.finite import first_nonfinite

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 1, 1023, 1024, 2999])
def test_the_first_bad_value_is_found(dtype: type, bad: float, index: int) -> None:
    rows = np.full((3, 1000), np.finfo(np.float16).max, dtype)
    rows.reshape(-1)[index] = bad
    rows.reshape(-1)[2999] = bad
    assert first_nonfinite(rows) == index


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_finite_pattern_passes(dtype: type) -> None:
    if dtype is np.float32:
        facts = np.finfo(np.float32)
        rows = np.array([0.0, -0.0, facts.max, facts.min, facts.smallest_subnormal], np.float32)
    else:
        rows = np.arange(65536, dtype=np.uint16).view(dtype)
        rows = rows[np.isfinite(rows.astype(np.float32))]
    assert first_nonfinite(rows) == -1


def test_the_message_names_tensor_row_and_column() -> None:
    rows = np.zeros((4, 8), np.float32)
    rows[2, 3] = np.nan
    with pytest.raises(BadWeights, match=r"^blk\.0\.ffn_up\.weight: weight at row 12, column 3 is nan"):
        check_finite(rows, "blk.0.ffn_up.weight", 10)
