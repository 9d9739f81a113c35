"""The float16 scales of super-blocks are fitted to what is there."""

from __future__ import annotations

import numpy as np
import pytest

from calibrate.rounding.factor import Factor
from calibrate.rounding.scalar.k_quants import LAYOUTS, SuperBlocks
from calibrate.rounding.scalar.refinement import refit
from tests.calibrate.rounding.moments import correlated, weights
from tests.quantize.codecs import decode, encode

HESSIAN = Factor.of(correlated(256)).hessian


def cost(errors: np.ndarray) -> np.ndarray:
    return np.einsum("rc,rc->r", errors @ HESSIAN.astype(float), errors)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.type.name)
def test_the_fit_is_the_best_there_is(layout: SuperBlocks) -> None:
    """As good as least squares by numpy, but for the rounding to float16."""
    rows = weights(20, 256)
    blocks = layout.read(encode(layout.type, rows, None))
    before = rows.astype(float) - decode(layout.type, layout.write(blocks))
    fitted = refit(layout, blocks, (before @ HESSIAN).astype(np.float32), HESSIAN)
    after = rows.astype(float) - decode(layout.type, layout.write(fitted))
    assert (cost(after) <= cost(before) * (1 + 1e-6)).all()
    assert cost(after).sum() < 0.999 * cost(before).sum()
    root = np.linalg.cholesky(HESSIAN.astype(float))
    for row, error in zip(range(20), after, strict=True):
        rise = np.repeat(blocks.scales[row], layout.sub_elems) * layout.levels[blocks.codes[row]]
        basis = [rise, np.repeat(blocks.lows[row], layout.sub_elems)] if layout.low_top else [rise]
        design, target = np.stack(basis, axis=1).T.astype(float) @ root, rows[row].astype(float) @ root
        best = np.linalg.lstsq(design.T, target, rcond=None)[1]
        assert cost(error[None])[0] <= best[0] * 1.02


def test_scales_that_fit_already_stay() -> None:
    layout = LAYOUTS[0]
    blocks = layout.read(encode(layout.type, weights(5, 256), None))
    fitted = refit(layout, blocks, np.zeros((5, 256), np.float32), HESSIAN)
    np.testing.assert_array_equal(layout.write(fitted), layout.write(blocks))
