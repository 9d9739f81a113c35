"""Rows to bytes with feedback: panels of columns from left to right, the errors of each taken off the rest.

Rounding from left to right looks ahead only: when a block is chosen, nothing is known of what will become of
the later ones. So sweeps follow, which choose one block after the other anew, with all others as they are.
The cost of a row falls with every step, until no block by itself can do better.
"""

from __future__ import annotations

import numpy as np

from gguf_tools.errors import ShapeError
from gguf_tools.format.ggml_types import GGMLType
from quantize.formats import get_format
from quantize.formats.base import BlockRefused, Bytes, Floats32, Rows, as_source, check_rows
from quantize.rounding.base import DEFAULT, PANEL, Effort, Refiner, Rounder
from quantize.rounding.factor import Factor
from quantize.rounding.products import errors_in, feed_back, pull
from quantize.rounding.rounders import get_rounder


def encode_compensated(rows: Rows, type_: GGMLType, factor: Factor, effort: Effort = DEFAULT) -> Bytes:
    """Encode rows so that the errors e of each cost little: e H e^T.

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
    return encode_rows(floats, rounder, factor, effort)


def encode_rows(rows: Floats32, rounder: Rounder, factor: Factor, effort: Effort) -> Bytes:
    """Encode finite rows, at least one."""
    data = _round_rows(rows, rounder, factor, effort)
    if isinstance(rounder, Refiner):
        decode = get_format(rounder.type).decode
        _refine_rows(data, decode(data, rows.shape[1]) - rows, rounder, factor, effort)
    return data


def _round_rows(rows: Floats32, rounder: Rounder, factor: Factor, effort: Effort) -> Bytes:
    """Round panel after panel, from left to right."""
    type_ = rounder.type
    n_rows, n_cols = rows.shape
    work = rows.copy()
    data = np.empty((n_rows, type_.row_bytes(n_cols)), np.uint8)
    for start in range(0, n_cols, PANEL):
        panel = factor.panel(start, min(start + PANEL, n_cols))
        own = np.ascontiguousarray(work[:, panel.columns])
        block, values = rounder.round_block(own, panel, effort)
        data[:, type_.row_bytes(start) : type_.row_bytes(panel.stop)] = block
        errors, n = errors_in(own - values, panel.upper), panel.stop - start
        feed_back(as_source(errors), n, as_source(factor.upper), start, panel.stop, n_cols, work.reshape(-1))
    return data


def _refine_rows(
    data: Bytes, minus_errors: Floats32, refiner: Refiner, factor: Factor, effort: Effort
) -> None:
    """Replace bytes of rows by such as cost no more, in up to effort.sweeps over all blocks.

    data          uint8 (n_rows, row bytes), at least one row
    minus_errors  float32 (n_rows, n_cols), what the bytes decode to less the rows; overwritten
    """
    n_rows, n_cols = minus_errors.shape
    hessian = as_source(factor.hessian)
    block_bytes = data.shape[1] * PANEL // n_cols
    for _ in range(effort.sweeps):
        has_changed = False
        for start in range(0, n_cols, PANEL):
            panel = factor.panel(start, min(start + PANEL, n_cols))
            own = panel.columns
            of_block = slice(start // PANEL * block_bytes, (start // PANEL + 1) * block_bytes)
            pulls = np.empty((n_rows, panel.stop - start), np.float32)
            pull(as_source(minus_errors), hessian, start, panel.stop, pulls.reshape(-1))
            better, moves = refiner.refine_block(
                np.ascontiguousarray(data[:, of_block]), pulls, panel, effort
            )
            if moves.any():
                has_changed = True
                data[:, of_block] = better
                minus_errors[:, own] += moves
        if not has_changed:
            break


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
