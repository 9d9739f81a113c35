"""Slow, obvious twins of every codec: one row at a time, one number at a time, in the reference's order.

They are the specification that the kernels are compared with when llama.cpp itself is not there, and the
place to look up what a kernel is meant to compute. A twin takes a float32 row (n_cols,) and importances
(n_cols,) or None, and returns the row's bytes; its inverse takes the bytes and returns the float32 row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tests.naive import blocks_of_32, few_bits, floats, fp4, iq1, iq2, iq3, nonlinear, super_blocks

Row = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

QUANTIZE: dict[str, Callable[[Row, Row | None], Bytes]] = {
    "F32": lambda row, weights: row.view(np.uint8),
    "F16": lambda row, weights: np.array([floats.to_half(x) for x in row], "<u2").view(np.uint8),
    "BF16": lambda row, weights: np.array([floats.to_bfloat16(x) for x in row], "<u2").view(np.uint8),
    "Q4_0": blocks_of_32.quantize_q4_0,
    "Q4_1": blocks_of_32.quantize_q4_1,
    "Q5_0": blocks_of_32.quantize_q5_0,
    "Q5_1": blocks_of_32.quantize_q5_1,
    "Q8_0": blocks_of_32.quantize_q8_0,
    "Q2_K": super_blocks.quantize_q2_k,
    "Q3_K": super_blocks.quantize_q3_k,
    "Q4_K": super_blocks.quantize_q4_k,
    "Q5_K": super_blocks.quantize_q5_k,
    "Q6_K": super_blocks.quantize_q6_k,
    "IQ2_XXS": iq2.quantize_iq2_xxs,
    "IQ2_XS": iq2.quantize_iq2_xs,
    "IQ2_S": iq2.quantize_iq2_s,
    "Q8_K": few_bits.quantize_q8_k,
    "IQ1_S": iq1.quantize_iq1_s,
    "IQ1_M": iq1.quantize_iq1_m,
    "IQ3_XXS": iq3.quantize_iq3_xxs,
    "IQ3_S": iq3.quantize_iq3_s,
    "IQ4_NL": nonlinear.quantize_iq4_nl,
    "IQ4_XS": nonlinear.quantize_iq4_xs,
    "TQ1_0": few_bits.quantize_tq1_0,
    "TQ2_0": few_bits.quantize_tq2_0,
    "MXFP4": fp4.quantize_mxfp4,
    "NVFP4": fp4.quantize_nvfp4,
    "Q1_0": few_bits.quantize_q1_0,
    "Q2_0": few_bits.quantize_q2_0,
}

DEQUANTIZE: dict[str, Callable[[Bytes], Row]] = {
    "F32": lambda data: data.view("<f4"),
    "F16": lambda data: np.array([floats.from_half(h) for h in data.view("<u2")]),
    "BF16": lambda data: np.array([floats.from_bfloat16(b) for b in data.view("<u2")]),
    "Q4_0": blocks_of_32.dequantize_q4_0,
    "Q4_1": blocks_of_32.dequantize_q4_1,
    "Q5_0": blocks_of_32.dequantize_q5_0,
    "Q5_1": blocks_of_32.dequantize_q5_1,
    "Q8_0": blocks_of_32.dequantize_q8_0,
    "Q2_K": super_blocks.dequantize_q2_k,
    "Q3_K": super_blocks.dequantize_q3_k,
    "Q4_K": super_blocks.dequantize_q4_k,
    "Q5_K": super_blocks.dequantize_q5_k,
    "Q6_K": super_blocks.dequantize_q6_k,
    "IQ2_XXS": iq2.dequantize_iq2_xxs,
    "IQ2_XS": iq2.dequantize_iq2_xs,
    "IQ2_S": iq2.dequantize_iq2_s,
    "Q8_K": few_bits.dequantize_q8_k,
    "IQ1_S": iq1.dequantize_iq1_s,
    "IQ1_M": iq1.dequantize_iq1_m,
    "IQ3_XXS": iq3.dequantize_iq3_xxs,
    "IQ3_S": iq3.dequantize_iq3_s,
    "IQ4_NL": nonlinear.dequantize_iq4_nl,
    "IQ4_XS": nonlinear.dequantize_iq4_xs,
    "TQ1_0": few_bits.dequantize_tq1_0,
    "TQ2_0": few_bits.dequantize_tq2_0,
    "MXFP4": fp4.dequantize_mxfp4,
    "NVFP4": fp4.dequantize_nvfp4,
    "Q1_0": few_bits.dequantize_q1_0,
    "Q2_0": few_bits.dequantize_q2_0,
}
