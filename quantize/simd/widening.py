"""Widening: 16-bit floats as float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.simd.kernel import kernel
from quantize.simd.tiles import read_item


@kernel
def widen(source: npt.NDArray[Any], widened: npt.NDArray[np.float32]) -> None:
    """Fill `widened` with the values of a flat array made by `base.as_source`, exactly."""
    for i in range(source.size):
        widened[i] = read_item(source, i)
