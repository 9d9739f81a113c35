"""Slow, obvious twins of every codec: one row at a time, one number at a time, in the reference's order.

They are the specification that the kernels are compared with when llama.cpp itself is not there, and the
place to look up what a kernel is meant to compute. A twin takes a float32 row (n_cols,) and importances
(n_cols,) or None, and returns the row's bytes; its inverse takes the bytes and returns the float32 row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.naive import blocks_of_32, few_bits, floats, fp4, ik, iq1, iq2, iq3, nonlinear, super_blocks

Row = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Twin:
    """What a codec has to give, row by row."""

    encode: Callable[[Row, Row | None], Bytes]
    decode: Callable[[Bytes], Row]


TWINS: dict[str, Twin] = {
    "F32": Twin(lambda row, weights: row.view(np.uint8), lambda data: data.view("<f4")),
    "F16": Twin(
        lambda row, weights: np.array([floats.to_half(x) for x in row], "<u2").view(np.uint8),
        lambda data: np.array([floats.from_half(h) for h in data.view("<u2")]),
    ),
    "BF16": Twin(
        lambda row, weights: np.array([floats.to_bfloat16(x) for x in row], "<u2").view(np.uint8),
        lambda data: np.array([floats.from_bfloat16(b) for b in data.view("<u2")]),
    ),
    "Q4_0": Twin(blocks_of_32.quantize_q4_0, blocks_of_32.dequantize_q4_0),
    "Q4_1": Twin(blocks_of_32.quantize_q4_1, blocks_of_32.dequantize_q4_1),
    "Q5_0": Twin(blocks_of_32.quantize_q5_0, blocks_of_32.dequantize_q5_0),
    "Q5_1": Twin(blocks_of_32.quantize_q5_1, blocks_of_32.dequantize_q5_1),
    "Q8_0": Twin(blocks_of_32.quantize_q8_0, blocks_of_32.dequantize_q8_0),
    "Q2_K": Twin(super_blocks.quantize_q2_k, super_blocks.dequantize_q2_k),
    "Q3_K": Twin(super_blocks.quantize_q3_k, super_blocks.dequantize_q3_k),
    "Q4_K": Twin(super_blocks.quantize_q4_k, super_blocks.dequantize_q4_k),
    "Q5_K": Twin(super_blocks.quantize_q5_k, super_blocks.dequantize_q5_k),
    "Q6_K": Twin(super_blocks.quantize_q6_k, super_blocks.dequantize_q6_k),
    "IQ2_XXS": Twin(iq2.quantize_iq2_xxs, iq2.dequantize_iq2_xxs),
    "IQ2_XS": Twin(iq2.quantize_iq2_xs, iq2.dequantize_iq2_xs),
    "IQ2_S": Twin(iq2.quantize_iq2_s, iq2.dequantize_iq2_s),
    "Q8_K": Twin(few_bits.quantize_q8_k, few_bits.dequantize_q8_k),
    "IQ1_S": Twin(iq1.quantize_iq1_s, iq1.dequantize_iq1_s),
    "IQ1_M": Twin(iq1.quantize_iq1_m, iq1.dequantize_iq1_m),
    "IQ3_XXS": Twin(iq3.quantize_iq3_xxs, iq3.dequantize_iq3_xxs),
    "IQ3_S": Twin(iq3.quantize_iq3_s, iq3.dequantize_iq3_s),
    "IQ4_NL": Twin(nonlinear.quantize_iq4_nl, nonlinear.dequantize_iq4_nl),
    "IQ4_XS": Twin(nonlinear.quantize_iq4_xs, nonlinear.dequantize_iq4_xs),
    "TQ1_0": Twin(few_bits.quantize_tq1_0, few_bits.dequantize_tq1_0),
    "TQ2_0": Twin(few_bits.quantize_tq2_0, few_bits.dequantize_tq2_0),
    "MXFP4": Twin(fp4.quantize_mxfp4, fp4.dequantize_mxfp4),
    "NVFP4": Twin(fp4.quantize_nvfp4, fp4.dequantize_nvfp4),
    "Q1_0": Twin(few_bits.quantize_q1_0, few_bits.dequantize_q1_0),
    "Q2_0": Twin(few_bits.quantize_q2_0, few_bits.dequantize_q2_0),
}

DECODERS: dict[str, Callable[[Bytes], Row]] = {
    "Q6_0": ik.dequantize_q6_0,
    "IQ2_K": ik.dequantize_iq2_k,
    "IQ3_K": ik.dequantize_iq3_k,
    "IQ4_K": ik.dequantize_iq4_k,
    "IQ2_KS": ik.dequantize_iq2_ks,
    "IQ4_KS": ik.dequantize_iq4_ks,
    "IQ4_KSS": ik.dequantize_iq4_kss,
    "IQ3_KT": ik.dequantize_iq3_kt,
    "IQ4_KT": ik.dequantize_iq4_kt,
}
"""Of types that can only be decoded; the rest of these are compared with recorded rows alone."""

GROUP_DECODERS: dict[str, Callable[[Bytes], Row]] = {
    "Q8_K_R8": ik.dequantize_q8_k_r8,
    "Q3_K_R4": ik.dequantize_q3_k_r4,
    "IQ4_KS_R4": ik.dequantize_iq4_ks_r4,
}
"""Of interleaved types: the bytes of a group of rows -> its rows, (n_rows, n_cols)."""
