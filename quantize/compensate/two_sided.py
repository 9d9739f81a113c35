"""Feedback on both sides: errors of a row are made up for in later columns, and then in later rows.

With G the second moments of the gradients at the outputs, an error E of the whole matrix costs tr(G E H E^T).
Rows are taken a few at a time. Each few are encoded under H; what is lost in them is carried on to the rows
after them as factor.py carries errors of columns to later columns, with G in the place of H. So damage goes
where the loss of the model does not look.
"""

from __future__ import annotations

import numpy as np

from gguf_tools.errors import ShapeError
from gguf_tools.ggml_types import GGMLType
from quantize.compensate.base import DEFAULT, PANEL, Effort, Rounder
from quantize.compensate.factor import Factor
from quantize.compensate.feedback import (
    check_finite,
    check_fit,
    costs,
    encode_rows,
    stock_weighting,
    whitened,
)
from quantize.compensate.products import feed_back
from quantize.compensate.rounders import get_rounder
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, Rows, as_source
from quantize.simd.lanes import LANES

OUTPUT_DAMP = 0.1
"""The share of the mean diagonal to add to moments of gradients, which are noisier than those of inputs."""

ROWS_AT_ONCE = LANES
"""Rows that are encoded before their errors are carried on.

One at a time would do 1 to 4 % less damage, and take sixteen times as long.
"""


def encode_two_sided(
    rows: Rows, type_: GGMLType, factor: Factor, output_factor: Factor, effort: Effort = DEFAULT
) -> Bytes:
    """Return all rows of a matrix as the bytes of a type, chosen so that tr(G E H E^T) is small.

    Where the stock encoder's bytes do less damage, it returns those.

    rows           (n_rows, n_cols) of quantize.formats.base.ROW_DTYPES: all of the matrix, because a row's
                   bytes depend on the rows before it
    factor         of the second moments H of the n_cols inputs
    output_factor  of the second moments G of the gradients at the n_rows outputs, damped by OUTPUT_DAMP
    returns        uint8 (n_rows, row bytes), C-contiguous
    raises         what encode_compensated raises, and ShapeError if output_factor is not of n_rows
    """
    check_fit(rows, type_, factor)
    n_rows, n_cols = rows.shape
    if output_factor.size != n_rows:
        found = f"second moments of the gradients of {output_factor.size} outputs"
        raise ShapeError(f"{type_.name}: {n_rows} rows, but {found}")
    floats = np.array(rows, np.float32, order="C")
    check_finite(floats, type_)
    codec = get_format(type_)
    upper = _padded(output_factor.upper)
    data = _round_rows(floats, get_rounder(type_), factor, upper, effort)
    stock = codec.encode(floats, stock_weighting(factor))
    of_stock, of_ours = (_damage(floats, codec.decode(d, n_cols), factor, upper) for d in (stock, data))
    return data if of_ours < of_stock else stock


def _round_rows(
    rows: Floats32, rounder: Rounder, factor: Factor, output_upper: Floats32, effort: Effort
) -> Bytes:
    """Return the bytes of finite rows, without a look at the stock encoder's.

    output_upper  float32 (n, n), that of the outputs, made as large as a multiple of LANES
    """
    n_rows, n_cols = rows.shape
    padded = len(output_upper)
    decode = get_format(rounder.type).decode
    work = _transposed(rows, padded)
    data = np.empty((n_rows, rounder.type.row_bytes(n_cols)), np.uint8)
    for start in range(0, padded, PANEL):
        stop = min(start + PANEL, padded)
        panel = np.ascontiguousarray(output_upper[start:stop, start:stop])
        own = np.ascontiguousarray(work[:, start:stop])
        errors = np.empty_like(own)
        for first in range(0, stop - start, ROWS_AT_ONCE):
            last = first + ROWS_AT_ONCE
            now = np.ascontiguousarray(own[:, first:last].T)
            block = encode_rows(now, rounder, factor, effort)
            data[start + first : start + last] = block[: n_rows - start - first]
            moves = _transposed(now - decode(block, n_cols), ROWS_AT_ONCE)
            lost = whitened(moves, np.ascontiguousarray(panel[first:last, first:last]))
            errors[:, first:last] = lost
            n = stop - start
            feed_back(as_source(lost), ROWS_AT_ONCE, as_source(panel), first, last, n, own.reshape(-1))
        feed_back(
            as_source(errors),
            stop - start,
            as_source(output_upper),
            start,
            stop,
            padded,
            work.reshape(-1),
        )
    return data


def _damage(rows: Floats32, values: Floats32, factor: Factor, output_upper: Floats32) -> float:
    """Return tr(G E H E^T) of the errors E = rows - values."""
    moves = _transposed(rows - values, len(output_upper))
    by_row = np.ascontiguousarray(whitened(moves, output_upper).T)
    return float(costs(by_row, np.zeros_like(by_row), factor).sum())


def _padded(upper: Floats32) -> Floats32:
    """Return a factor of as many more rows and columns as make a multiple of LANES; those stand alone."""
    n = len(upper)
    padded = np.eye(-(-n // LANES) * LANES, dtype=np.float32)
    padded[:n, :n] = upper
    return padded


def _transposed(rows: Floats32, width: int) -> Floats32:
    """Return rows as columns, zeros added to the right: float32 (n_cols, width)."""
    columns = np.zeros((rows.shape[1], width), np.float32)
    columns[:, : len(rows)] = rows.T
    return columns
