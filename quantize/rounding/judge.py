"""The judge of encodings: what they cost under second moments, and which rows keep the stock encoder's bytes.

The stock encoder of a type is its codec in quantize.formats, which weighs each column's error by itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, as_source
from quantize.rounding.factor import Each, Factor
from quantize.rounding.products import add_squares, whitened
from quantize.rounding.two_sided import OutputFactor

Costs = npt.NDArray[np.float64]


def costs(errors: Floats32, factor: Factor) -> Costs:
    """Compute what the errors e of each row cost, e H e^T: float64 (n_rows,).

    errors  float32 (n_rows, n_cols), overwritten
    """
    totals = np.zeros(len(errors), np.float64)
    if totals.size:
        add_squares(as_source(whitened(errors, factor.upper)), totals)
    return totals


def choose_cheaper(
    rows: Floats32,
    data: Bytes,
    stock: Bytes,
    type_: GGMLType,
    factor: Factor,
    outputs: OutputFactor | None = None,
    each: Each = map,
) -> Bytes:
    """Choose a method's bytes where they cost less than the stock encoder's: uint8 (n_rows, row bytes).

    Each row is chosen by itself, or with those that the type interleaves. Rows with an output factor have
    made up for each other's errors E, so all of them are chosen together, by tr(G E H E^T).

    Stock's bytes stay at the same cost, and where feedback has made a scale infinite, so that a cost is NaN.

    rows     float32 (n_rows, n_cols), at least one: the aim of rounding
    data     uint8 (n_rows, row bytes), the method's
    stock    uint8 (n_rows, row bytes), the stock encoder's
    outputs  of the n_rows outputs; None where only the inputs count
    each     computes what either costs; see `Factor.of`
    """
    decode = get_format(type_).decode

    def cost(which: int) -> Costs:
        errors = rows - decode((data, stock)[which], factor.size)
        if outputs is None:
            return costs(errors, factor).reshape(-1, type_.rows_interleaved).sum(1)
        return costs(outputs.whitened(errors), factor).sum(keepdims=True)

    of_data, of_stock = each(cost, range(2))
    is_cheaper = of_data < of_stock
    n_together = len(rows) // len(is_cheaper)
    return np.where(np.repeat(is_cheaper, n_together)[:, None], data, stock)
