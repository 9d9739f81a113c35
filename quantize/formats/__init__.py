"""The codecs, one module per ggml type, found by name.

A module is imported when its format is first asked for: listing the names costs nothing, and numba is
loaded by a run that encodes, not by one that prints a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from gguf_tools.errors import QuantError
from gguf_tools.ggml_types import GGMLType

if TYPE_CHECKING:
    from quantize.formats.base import QuantFormat

FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "F32": "floats.f32",
        "F16": "floats.f16",
        "BF16": "floats.bf16",
        "Q4_0": "blocks_of_32.q4_0",
        "Q4_1": "blocks_of_32.q4_1",
        "Q5_0": "blocks_of_32.q5_0",
        "Q5_1": "blocks_of_32.q5_1",
        "Q8_0": "blocks_of_32.q8_0",
        "Q2_K": "k_quants.q2_k",
        "Q3_K": "k_quants.q3_k",
        "Q4_K": "k_quants.q4_k",
        "Q5_K": "k_quants.q5_k",
        "Q6_K": "k_quants.q6_k",
        "Q8_K": "k_quants.q8_k",
        "IQ1_S": "iq.iq1_s",
        "IQ1_M": "iq.iq1_m",
        "IQ2_XXS": "iq.iq2_xxs",
        "IQ2_XS": "iq.iq2_xs",
        "IQ2_S": "iq.iq2_s",
        "IQ3_XXS": "iq.iq3_xxs",
        "IQ3_S": "iq.iq3_s",
        "IQ4_NL": "iq.iq4_nl",
        "IQ4_XS": "iq.iq4_xs",
        "TQ1_0": "few_bits.tq1_0",
        "TQ2_0": "few_bits.tq2_0",
        "MXFP4": "fp4.mxfp4",
        "NVFP4": "fp4.nvfp4",
        "Q1_0": "few_bits.q1_0",
        "Q2_0": "few_bits.q2_0",
    }
)
"""ggml type name -> module in this package."""


def available() -> tuple[str, ...]:
    """Return the names of the types that can be encoded and decoded."""
    return tuple(FORMATS)


def get_format(type_: str | GGMLType) -> QuantFormat:
    """Return the codec of a ggml type, given the type or its name in any case.

    raises   QuantError for a type without a codec
    """
    name = type_.name if isinstance(type_, GGMLType) else type_.upper()
    module = FORMATS.get(name)
    if module is None:
        raise QuantError(f"{name}: no codec for this type; there are {', '.join(FORMATS)}")
    format_: QuantFormat = import_module(f"quantize.formats.{module}").FORMAT
    return format_
