"""Complete rows made better: one block of columns after the other chosen anew, with all others as they are.

Feedback looks ahead only: when a block is chosen, nothing is known of what will become of the later ones.
Here everything is known. The cost of a row falls with every step, until no block by itself can do better.
"""

from __future__ import annotations

import numpy as np

from calibrate.rounding.base import PANEL, Effort, Refiner
from calibrate.rounding.factor import Factor
from calibrate.rounding.products import feed_back
from quantize.formats.base import Bytes, Decode, Floats32, as_source


def refine_rows(
    rows: Floats32, data: Bytes, decode: Decode, refiner: Refiner, factor: Factor, effort: Effort
) -> Bytes:
    """Return bytes of rows that cost no more than `data`, after up to effort.sweeps over all blocks.

    rows    float32 (n_rows, n_cols), at least one row
    data    uint8 (n_rows, row bytes)
    decode  of the type
    """
    n_cols = rows.shape[1]
    data, hessian = data.copy(), as_source(factor.hessian)
    blocks = range(0, n_cols, PANEL)
    block_bytes = data.shape[1] * PANEL // n_cols
    minus_errors = decode(data, n_cols) - rows
    pulls = np.empty_like(rows)
    for _ in range(effort.sweeps):
        has_changed = False
        for start in blocks:
            own = slice(start, min(start + PANEL, n_cols))
            of_block = slice(start // PANEL * block_bytes, (start // PANEL + 1) * block_bytes)
            pulls[:, own] = 0
            for other in blocks:
                errors = as_source(np.ascontiguousarray(minus_errors[:, other : other + PANEL]))
                n = min(PANEL, n_cols - other)
                feed_back(errors, n, hessian, other, own.start, own.stop, pulls.reshape(-1))
            better, moves = refiner.refine_block(
                np.ascontiguousarray(data[:, of_block]),
                np.ascontiguousarray(pulls[:, own]),
                factor,
                start,
                effort,
            )
            if moves.any():
                has_changed = True
                data[:, of_block] = better
                minus_errors[:, own] += moves
        if not has_changed:
            break
    return data
