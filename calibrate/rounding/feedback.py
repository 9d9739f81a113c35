"""Rows to bytes with feedback: panels of columns from left to right, the errors of each taken off the rest.

A row whose bytes cost more than those of the stock encoder keeps the stock encoder's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from calibrate.rounding.base import DEFAULT, PANEL, Effort, Refiner, Rounder
from calibrate.rounding.factor import Factor
from calibrate.rounding.products import add_squares, errors_of, feed_back
from calibrate.rounding.refine import refine_rows
from calibrate.rounding.rounders import get_rounder
from gguf_tools.errors import ShapeError
from gguf_tools.format.ggml_types import GGMLType
from quantize.formats import get_format
from quantize.formats.base import BlockRefused, Bytes, Floats32, Rows, as_source, check_rows
from quantize.importances.weighting import ColumnWeights


def encode_compensated(rows: Rows, type_: GGMLType, factor: Factor, effort: Effort = DEFAULT) -> Bytes:
    """Return `rows` as the bytes of a type, chosen so that the errors e of a row cost little: e H e^T.

    A row's bytes are the same whatever other rows are encoded with it.

    rows     (n_rows, n_cols) of quantize.formats.base.ROW_DTYPES
    factor   of the second moments of the n_cols inputs
    returns  uint8 (n_rows, row bytes), C-contiguous
    raises   ShapeError if rows and factor don't fit the type or each other; QuantError for a type without
             rounding with feedback; BlockRefused for weights that the type can't hold
    """
    check_fit(rows, type_, factor)
    n_rows, n_cols = rows.shape
    if n_rows == 0:
        return np.empty((0, type_.row_bytes(n_cols)), np.uint8)
    rounder = get_rounder(type_)
    floats = np.array(rows, np.float32, order="C")
    check_finite(floats, type_)
    data = encode_rows(floats, rounder, factor, effort)
    codec = get_format(type_)
    stock = codec.encode(floats, stock_weighting(factor))
    of_stock, of_ours = (costs(floats, codec.decode(d, n_cols), factor) for d in (stock, data))
    worse = ~(of_ours <= of_stock)  # also where feedback has made a scale infinite, and the cost is a NaN
    data[worse] = stock[worse]
    return data


def stock_weighting(factor: Factor) -> ColumnWeights:
    """Return what the stock encoder weighs errors by: the moment of each column by itself."""
    return ColumnWeights(np.diag(factor.hessian).copy())


def costs(rows: Floats32, values: Floats32, factor: Factor) -> npt.NDArray[np.float64]:
    """Return what the errors e of each row cost, e H e^T: float64 (n_rows,).

    rows, values  float32 (n_rows, n_cols)
    """
    return costs_of(rows - values, factor)


def costs_of(moves: Floats32, factor: Factor) -> npt.NDArray[np.float64]:
    """Return what `costs` returns for rows - values; these `moves` are lost."""
    totals = np.zeros(len(moves), np.float64)
    if totals.size:
        add_squares(as_source(whitened(moves, factor.upper)), totals)
    return totals


def whitened(moves: Floats32, upper: Floats32) -> Floats32:
    """Return errors with errors @ upper = moves: their squares add up to what the moves cost.

    moves    float32 (n_rows, n), n a multiple of LANES and at least one row; lost
    upper    float32 (n, n), upper triangular
    """
    n = moves.shape[1]
    errors = np.empty_like(moves)
    for start in range(0, n, PANEL):
        stop = min(start + PANEL, n)
        own = _errors(moves[:, start:stop], upper, start)
        errors[:, start:stop] = own
        feed_back(as_source(own), stop - start, as_source(upper), start, stop, n, moves.reshape(-1))
    return errors


def encode_rows(rows: Floats32, rounder: Rounder, factor: Factor, effort: Effort) -> Bytes:
    """Return the bytes of finite rows, at least one, without a look at the stock encoder's."""
    data = _round_rows(rows, rounder, factor, effort)
    if isinstance(rounder, Refiner):
        data = refine_rows(rows, data, get_format(rounder.type).decode, rounder, factor, effort)
    return data


def _round_rows(rows: Floats32, rounder: Rounder, factor: Factor, effort: Effort) -> Bytes:
    type_ = rounder.type
    n_rows, n_cols = rows.shape
    work = rows.copy()
    data = np.empty((n_rows, type_.row_bytes(n_cols)), np.uint8)
    for start in range(0, n_cols, PANEL):
        stop = min(start + PANEL, n_cols)
        own = np.ascontiguousarray(work[:, start:stop])
        upper = np.ascontiguousarray(factor.upper[start:stop, start:stop])
        block, values = rounder.round_block(own, upper, factor.importances[start:stop], effort)
        data[:, type_.row_bytes(start) : type_.row_bytes(stop)] = block
        errors = _errors(own - values, factor.upper, start)
        feed_back(
            as_source(errors), stop - start, as_source(factor.upper), start, stop, n_cols, work.reshape(-1)
        )
    return data


def _errors(moves: Floats32, upper: Floats32, first: int) -> Floats32:
    """Return what makes up for `moves` of the columns from `first` on, by themselves."""
    n = moves.shape[1]
    own = np.ascontiguousarray(upper[first : first + n, first : first + n])
    errors = np.empty(moves.shape, np.float32)
    errors_of(as_source(moves), as_source(own), n, errors.reshape(-1))
    return errors


def check_fit(rows: Rows, type_: GGMLType, factor: Factor) -> None:
    """Raise ShapeError unless `rows` can be encoded as `type_`, and `factor` is one of such rows."""
    check_rows(rows, None, type_)
    if factor.size != rows.shape[1]:
        found = f"second moments of {factor.size}"
        raise ShapeError(f"{type_.name}: rows of {rows.shape[1]} columns, but {found}")


def check_finite(rows: Floats32, type_: GGMLType) -> None:
    """Raise BlockRefused naming row and column of a weight that is not a finite number."""
    finite = np.isfinite(rows)
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        raise BlockRefused(type_.name, int(row), f", column {column}: a weight is not a finite number")
