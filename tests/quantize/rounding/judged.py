"""Rows as a calibrated run has them: with feedback, where the judge does not prefer the stock encoder's."""

from __future__ import annotations

import numpy as np

from gguf_tools.format.ggml_types import GGMLType
from quantize.rounding.factor import Factor
from quantize.rounding.feedback import encode_compensated
from quantize.rounding.judge import choose_cheaper
from quantize.rounding.methods.diagonal import encode_stock


def encode_judged(rows: np.ndarray, type_: GGMLType, factor: Factor) -> np.ndarray:
    """Return the bytes of float32 (n_rows, n_cols): uint8 (n_rows, row bytes)."""
    data, stock = encode_compensated(rows, type_, factor), encode_stock(rows, type_, factor)
    return choose_cheaper(rows, data, stock, type_, factor)
