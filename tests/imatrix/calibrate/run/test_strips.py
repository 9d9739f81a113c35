"""Strips: the bytes that are kept of those that a method and the stock encoder make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from gguf_tools.format.ggml_types import F32, Q4_K
from gguf_tools.format.tensors import TensorInfo
from quantize.fill.encode import RowSources
from quantize.rounding.factor import Factor
from quantize.rounding.feedback import encode_compensated
from quantize.rounding.methods import Method, Rates
from quantize.rounding.two_sided import OutputFactor
from tests.quantize.codecs import encode
from tests.quantize.rounding.moments import correlated, weights

pytest.importorskip("torch")

from imatrix.calibrate.run.strips import Strip, encode_strips
from imatrix.calibrate.statistics.conditions import Conditions
from imatrix.calibrate.statistics.gradient_factors import OutputBlock

ROWS = weights(16, 256)
IMPORTANCES = np.linspace(1, 2, 256, dtype=np.float32)
STOCK, ROUGH = encode(Q4_K, ROWS, IMPORTANCES), encode(Q4_K, np.float32(0.9) * ROWS, IMPORTANCES)
INFO = TensorInfo("t", ROWS.shape, Q4_K)
FACTOR = Factor.of(correlated(256))


@dataclass(frozen=True)
class Rows:
    """A tensor's rows, as a source has them."""

    rows: np.ndarray
    type = F32

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.rows[start:stop]


def kept(data: np.ndarray, block: OutputBlock | None = None) -> np.ndarray:
    """Return what is kept of a method's bytes."""
    method = Method("given", 1, lambda _type: True, lambda *_: [data], lambda _type: Rates(1, 0))
    conditions = Conditions(IMPORTANCES, 100, FACTOR, None, None)
    (strip,) = encode_strips(
        method, RowSources({"t": Rows(ROWS)}, {}), [Strip(INFO, 0, 16, conditions, block)]
    )
    np.testing.assert_array_equal(strip.stock, STOCK)
    assert strip.data is not None
    return strip.data


def test_a_row_that_a_method_makes_worse_keeps_the_stock_encoders_bytes() -> None:
    data = encode_compensated(ROWS, Q4_K, FACTOR)
    data[::3] = ROUGH[::3]
    found = kept(data)
    np.testing.assert_array_equal(found[::3], STOCK[::3])
    np.testing.assert_array_equal(found[1::3], data[1::3])
    np.testing.assert_array_equal(found[2::3], data[2::3])


def test_a_block_with_gradients_is_kept_or_left_as_a_whole() -> None:
    moments = np.eye(16)
    block = OutputBlock(0, 16, OutputFactor.of(moments), moments.astype(np.float32), 1.0)
    better, worse = encode_compensated(ROWS, Q4_K, FACTOR), STOCK.copy()
    better[5] = worse[5] = encode(Q4_K, np.float32(0.99) * ROWS[5:6], IMPORTANCES)[0]
    np.testing.assert_array_equal(kept(better, block), better)
    np.testing.assert_array_equal(kept(worse, block), STOCK)
