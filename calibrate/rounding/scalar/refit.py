"""The float16 scales of super-blocks, fitted under all moments to the codes and integer scales there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from calibrate.rounding.products import feed_back
from calibrate.rounding.scalar.blocks import Blocks, Layout, as_half
from quantize.formats.base import Floats32, as_source

_SINGULAR = 1e-6
"""The share of the product of both variances below which scale and minimum can't be told apart."""


def refit(layout: Layout, blocks: Blocks, pulls: Floats32, hessian: Floats32) -> Blocks:
    """Return blocks with the d and dmin that cost least, each where that is less than now.

    A value is d * rise - dmin * fall. Moving d by x and dmin by y costs, with the pulls p and moments H of
    the block, m H m^T - 2 p m^T for m = x * rise - y * fall: a least squares problem of two unknowns.

    pulls    float32 (n, elements), as in compensate.base.Refiner
    hessian  float32 (elements, elements)
    """
    rise = np.repeat(blocks.scales.astype(np.float32), layout.sub_elems, axis=1) * layout.levels[blocks.codes]
    fall = np.repeat(blocks.lows.astype(np.float32), layout.sub_elems, axis=1)
    rise_h = _product(rise, hessian)
    fall_h = _product(fall, hessian) if fall.any() else fall
    rr, rf, ff = _dot(rise_h, rise), _dot(rise_h, fall), _dot(fall_h, fall)
    rp, fp = _dot(rise, pulls), _dot(fall, pulls)
    determinant = rr * ff - rf * rf
    both = determinant > _SINGULAR * rr * ff
    divisor = np.where(both, determinant, 1)
    x = np.where(both, (ff * rp - rf * fp) / divisor, rp / np.where(rr > 0, rr, np.inf))
    y = np.where(both, (rf * rp - rr * fp) / divisor, 0)
    d, dmin = as_half(blocks.d[:, 0] + x), as_half(np.maximum(blocks.dmin[:, 0] + y, 0))
    x, y = d - blocks.d[:, 0].astype(np.float64), dmin - blocks.dmin[:, 0].astype(np.float64)
    gain = 2 * (x * rp - y * fp) - (x * x * rr - 2 * x * y * rf + y * y * ff)
    better = (gain > 0)[:, None]
    return replace(
        blocks, d=np.where(better, d[:, None], blocks.d), dmin=np.where(better, dmin[:, None], blocks.dmin)
    )


def _product(rows: Floats32, hessian: Floats32) -> Floats32:
    """Return rows @ hessian, summed up in the same order for any number of rows."""
    n = rows.shape[1]
    product = np.zeros_like(rows)
    feed_back(as_source(-rows), n, as_source(hessian), 0, 0, n, product.reshape(-1))
    return product


def _dot(left: Floats32, right: Floats32) -> npt.NDArray[np.float64]:
    """Return the product of each row with its partner, float64 (n,)."""
    return (left.astype(np.float64) * right).sum(axis=1)
