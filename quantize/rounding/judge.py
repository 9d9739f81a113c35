"""Costs of encodings under second moments, and whether feedback's bytes are kept or the stock encoder's.

The stock encoder of a type is its codec in quantize.formats, which weighs each column's error by itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import GGMLType
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, as_source
from quantize.importances.weighting import ColumnWeights
from quantize.rounding.factor import Factor
from quantize.rounding.products import add_squares, whitened

Costs = npt.NDArray[np.float64]


def stock_weighting(factor: Factor) -> ColumnWeights:
    """Take the moment of each column by itself, by which the stock encoder weighs errors."""
    return ColumnWeights(np.diag(factor.hessian).copy())


def encode_stock(rows: Floats32, type_: GGMLType, factor: Factor) -> Bytes:
    """Encode rows as the stock encoder does under a factor's moments: uint8 (n_rows, row bytes)."""
    return get_format(type_).encode(rows, stock_weighting(factor))


def costs(rows: Floats32, values: Floats32, factor: Factor) -> Costs:
    """Compute what the errors e of each row cost, e H e^T: float64 (n_rows,).

    rows, values  float32 (n_rows, n_cols)
    """
    return costs_of(rows - values, factor)


def costs_of(moves: Floats32, factor: Factor) -> Costs:
    """Compute what `costs` does for rows - values; overwrites these `moves`."""
    totals = np.zeros(len(moves), np.float64)
    if totals.size:
        add_squares(as_source(whitened(moves, factor.upper)), totals)
    return totals


def is_kept(ours: float | Costs, stock: float | Costs, *, at_equal_cost: bool) -> npt.NDArray[np.bool_]:
    """Whether feedback's bytes are kept: where they cost less than the stock encoder's.

    They are not where feedback has made a scale infinite and their cost is NaN.

    at_equal_cost  whether they are kept at the same cost as well: a row of zeros costs nothing either way
    """
    return np.asarray(ours <= stock if at_equal_cost else ours < stock)
