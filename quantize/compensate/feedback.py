"""Rows to bytes with feedback: blocks from left to right, the errors of each taken off the columns after it.

A row whose bytes cost more than those of the stock encoder keeps the stock encoder's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadWeights, ShapeError
from gguf_tools.ggml_types import GGMLType
from quantize.compensate.base import DEFAULT, Effort, Rounder
from quantize.compensate.factor import Factor
from quantize.compensate.products import PANEL, add_squares, errors_of, feed_back
from quantize.compensate.rounders import get_rounder
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, Rows, as_source, check_rows
from quantize.weighting import ColumnWeights


def encode_compensated(rows: Rows, type_: GGMLType, factor: Factor, effort: Effort = DEFAULT) -> Bytes:
    """Return `rows` as the bytes of a type, chosen so that the errors e of a row cost little: e H e^T.

    A row's bytes are the same whatever other rows are encoded with it.

    rows     (n_rows, n_cols) of quantize.formats.base.ROW_DTYPES
    factor   of the second moments of the n_cols inputs
    returns  uint8 (n_rows, row bytes), C-contiguous
    raises   ShapeError if rows and factor don't fit the type or each other; QuantError for a type without
             rounding with feedback; BadWeights for a weight that is no finite number
    """
    check_rows(rows, None, type_)
    n_rows, n_cols = rows.shape
    if factor.size != n_cols:
        raise ShapeError(f"{type_.name}: rows of {n_cols} columns, but second moments of {factor.size}")
    if n_rows == 0:
        return np.empty((0, type_.row_bytes(n_cols)), np.uint8)
    rounder = get_rounder(type_)
    floats = np.array(rows, np.float32, order="C")
    _check_finite(floats, type_)
    data = _round_rows(floats, rounder, factor, effort)
    codec = get_format(type_)
    stock = codec.encode(floats, ColumnWeights(np.diag(factor.hessian).copy()))
    worse = costs(floats, codec.decode(stock, n_cols), factor) < costs(
        floats, codec.decode(data, n_cols), factor
    )
    data[worse] = stock[worse]
    return data


def costs(rows: Floats32, values: Floats32, factor: Factor) -> npt.NDArray[np.float64]:
    """Return what the errors e of each row cost, e H e^T: float64 (n_rows,).

    rows, values  float32 (n_rows, n_cols)
    """
    n_rows, n_cols = rows.shape
    totals = np.zeros(n_rows, np.float64)
    if n_rows == 0:
        return totals
    rest, upper = rows - values, as_source(factor.upper)
    for start in range(0, n_cols, PANEL):
        stop = min(start + PANEL, n_cols)
        errors = _errors(rest[:, start:stop], factor, start)
        add_squares(as_source(errors), totals)
        feed_back(as_source(errors), stop - start, upper, start, stop, n_cols, rest.reshape(-1))
    return totals


def _round_rows(rows: Floats32, rounder: Rounder, factor: Factor, effort: Effort) -> Bytes:
    """Return the bytes of finite rows, at least one."""
    type_ = rounder.type
    n_rows, n_cols = rows.shape
    work = rows.copy()
    data = np.empty((n_rows, type_.row_bytes(n_cols)), np.uint8)
    upper = as_source(factor.upper)
    for start in range(0, n_cols, PANEL):
        stop = min(start + PANEL, n_cols)
        errors = np.empty((n_rows, stop - start), np.float32)
        for first in range(start, stop, type_.block_elems):
            last = first + type_.block_elems
            block, errors[:, first - start : last - start] = _round_block(
                work[:, first:last], rounder, factor, first, effort
            )
            data[:, type_.row_bytes(first) : type_.row_bytes(last)] = block
            own = as_source(errors[:, first - start : last - start])
            feed_back(own, type_.block_elems, upper, first, last, stop, work.reshape(-1))
        feed_back(as_source(errors), stop - start, upper, start, stop, n_cols, work.reshape(-1))
    return data


def _round_block(
    rows: Floats32, rounder: Rounder, factor: Factor, first: int, effort: Effort
) -> tuple[Bytes, Floats32]:
    """Return the bytes of the block that begins in column `first` of each row, and its errors.

    rows     float32 (n_rows, block), the weights with the feedback of earlier columns
    returns  uint8 (n_rows, bytes of a block), float32 (n_rows, block)
    """
    n = rows.shape[1]
    rows = np.ascontiguousarray(rows)
    upper = np.ascontiguousarray(factor.upper[first : first + n, first : first + n])
    data, values = rounder.round_block(rows, upper, factor.importances[first : first + n], effort)
    return data, _errors(rows - values, factor, first)


def _errors(moves: Floats32, factor: Factor, first: int) -> Floats32:
    """Return what makes up for `moves` of the columns from `first` on: errors @ upper = moves."""
    n = moves.shape[1]
    upper = np.ascontiguousarray(factor.upper[first : first + n, first : first + n])
    errors = np.empty(moves.shape, np.float32)
    errors_of(as_source(moves), as_source(upper), n, errors.reshape(-1))
    return errors


def _check_finite(rows: Floats32, type_: GGMLType) -> None:
    finite = np.isfinite(rows)
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        raise BadWeights(f"{type_.name}: row {row}, column {column}: a weight is not a finite number")
