"""The tables of codecs: everything the project knows of a ggml type that it can encode, one row per type.

What a type's bytes are is in its module, alone or beside types of the same idea; its sizes are facts of the
file format (ggml_types.py). All else is here and only here, so a new type is its kernels and one row. Listing
the tables loads no numba.

A type that can only be decoded has its row in DECODERS or INTERLEAVED. It can be the type of an
input, not of an output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Literal

from quantize.roles import Program

Machine = Literal["cpu", "gpu"]


class ImportanceUse(Enum):
    """Use that a codec makes of column importances.

    NEEDED    it can encode without, and llama-quantize refuses to, but for token_embd and output
              (llama-quant.cpp: tensor_requires_imatrix)
    REQUIRED  it can't encode without (ggml_quantize_requires_imatrix)
    """

    IGNORED = "ignored"
    OPTIONAL = "optional"
    NEEDED = "needed"
    REQUIRED = "required"


@dataclass(frozen=True)
class ErrorRange:
    """How far a type may move weights; quantize/fill/verify.py says how the numbers were found.

    relative  limit of the relative error of ordinary rows
    absolute  what is allowed of each weight on top, because small scales are coarse
    """

    relative: float
    absolute: float


_HALF_STEP = 2.0**-25
"""Half the spacing of float16 below 2**-14."""


def _halves(relative: float, multiple: float) -> ErrorRange:
    """Return the range of a type with float16 scales; a weight is at most `multiple` times one of them."""
    return ErrorRange(relative, multiple * _HALF_STEP)


def _singles(relative: float) -> ErrorRange:
    """Return the range of a type with float32 scales."""
    return ErrorRange(relative, 2.0**-120)


@dataclass(frozen=True)
class Codec:
    """A row of the table.

    module         of the codec, which is among its FORMATS; relative to quantize.formats where it starts with
                   a dot
    use            what it does with importances
    error_range    how far it may move weights
    typical_error  squared error that it makes of normally distributed weights, over their squares; all
                   columns weighed alike. `scripts/measure/odd_sizes.py errors` measures it anew
    falls_back_to  the type of smaller blocks that takes its place where a row is no whole number of its
                   blocks (llama-quant.cpp: tensor_type_fallback; for ik_llama.cpp's types its
                   change_type_if_necessary); None: there is no such type
    slow_on        where a model of the type runs slowly: on a CPU, types with a grid look up every group of
                   weights in a table; for GPUs, ggml-cuda has no kernels for ternary types, and no quantized
                   matrix product for IQ1_M (mmq.cu: ggml_cuda_should_use_mmq)
    lacked_by      the program that does not know the type; None: what its id says (plan/recipe_files.py)
    otherwise      what ik_llama.cpp has in the place of `falls_back_to`, where that is another type
    is_candidate   whether it is tried where sensitivities are measured: a type that llama.cpp's recipes use
    """

    module: str
    use: ImportanceUse
    error_range: ErrorRange
    typical_error: float
    falls_back_to: str | None = None
    slow_on: frozenset[Machine] = frozenset()
    lacked_by: Program | None = None
    otherwise: str | None = None
    is_candidate: bool = False

    def fallback(self, program: Program) -> str | None:
        """The type of smaller blocks that a program takes instead; None: there is none."""
        if program == "ik_llama.cpp" and self.otherwise is not None:
            return self.otherwise
        return self.falls_back_to


_CPU: frozenset[Machine] = frozenset({"cpu"})
_GPU: frozenset[Machine] = frozenset({"gpu"})
_IK: Program = "ik_llama.cpp"
_IGNORED, _OPTIONAL = ImportanceUse.IGNORED, ImportanceUse.OPTIONAL
_NEEDED, _REQUIRED = ImportanceUse.NEEDED, ImportanceUse.REQUIRED

_candidate = partial(Codec, is_candidate=True)

CODECS: Mapping[str, Codec] = {
    "F32": Codec(".floats", _IGNORED, ErrorRange(0.0, 0.0), 0.0),
    "F16": Codec(".floats", _IGNORED, ErrorRange(2.0**-11, _HALF_STEP), 4e-8),
    "BF16": Codec(".floats", _IGNORED, ErrorRange(2.0**-8, 2.0**-134), 2.7e-6),
    "Q4_0": _candidate(".blocks_of_32.q4_q5", _OPTIONAL, _halves(0.24, 8), 0.00671),
    "Q4_1": _candidate(".blocks_of_32.q4_q5", _OPTIONAL, _halves(0.21, 15 + 1), 0.00491),
    "Q5_0": _candidate(".blocks_of_32.q4_q5", _OPTIONAL, _halves(0.12, 16), 0.00165),
    "Q5_1": _candidate(".blocks_of_32.q4_q5", _OPTIONAL, _halves(0.11, 31 + 1), 0.00115),
    "Q8_0": _candidate(".blocks_of_32.q8_0", _IGNORED, _halves(0.015, 127), 2.8e-5),
    "Q2_K": _candidate(
        ".k_quants.affine", _OPTIONAL, _halves(1.00, 15 * 3 + 15), 0.0724, "Q4_0", otherwise="IQ4_NL"
    ),
    "Q3_K": _candidate(
        ".k_quants.symmetric", _OPTIONAL, _halves(0.38, 32 * 4), 0.0211, "Q4_0", otherwise="IQ4_NL"
    ),
    "Q4_K": _candidate(".k_quants.affine", _OPTIONAL, _halves(0.22, 63 * 15 + 63), 0.00503, "Q5_0"),
    "Q5_K": _candidate(
        ".k_quants.affine", _OPTIONAL, _halves(0.10, 63 * 31 + 63), 0.00126, "Q5_1", otherwise="Q6_0"
    ),
    "Q6_K": _candidate(".k_quants.symmetric", _OPTIONAL, _halves(0.05, 128 * 32), 0.000302, "Q8_0"),
    "Q8_K": Codec(".k_quants.q8_k", _IGNORED, ErrorRange(0.025, 2.0**-120), 5.0e-5),
    "IQ1_S": _candidate(".iq.iq1", _REQUIRED, _halves(1.00, 15 * 1.125), 0.237, "IQ4_NL", _CPU),
    "IQ1_M": _candidate(".iq.iq1", _NEEDED, _halves(1.50, 15 * 1.125), 0.205, "IQ4_NL", _CPU | _GPU),
    "IQ2_XXS": _candidate(".iq.iq2", _REQUIRED, _halves(0.71, 15.5 * 43 / 4), 0.119, "IQ4_NL", _CPU),
    "IQ2_XS": _candidate(".iq.iq2", _REQUIRED, _halves(0.60, 15.5 * 43 / 4), 0.0903, "IQ4_NL", _CPU),
    "IQ2_S": _candidate(".iq.iq2", _NEEDED, _halves(0.68, 15.5 * 43 / 4), 0.0623, "IQ4_NL", _CPU),
    "IQ3_XXS": _candidate(".iq.iq3", _NEEDED, _halves(0.64, 15.5 * 62 / 2), 0.0333, "IQ4_NL", _CPU),
    "IQ3_S": _candidate(".iq.iq3", _OPTIONAL, _halves(0.40, 31 * 15), 0.0189, "IQ4_NL", _CPU),
    "IQ4_NL": _candidate(".iq.iq4", _OPTIONAL, _halves(0.19, 127), 0.00564),
    "IQ4_XS": _candidate(".iq.iq4", _OPTIONAL, _halves(0.19, 32 * 127), 0.00574, "IQ4_NL"),
    "TQ1_0": Codec(".few_bits", _IGNORED, _halves(1.00, 1), 0.655, "Q4_0", _GPU, _IK),
    "TQ2_0": Codec(".few_bits", _IGNORED, _halves(1.00, 2), 0.655, "Q4_0", _GPU, _IK),
    "MXFP4": Codec(".fp4", _IGNORED, ErrorRange(0.34, 2.0**-120), 0.0133),
    "NVFP4": Codec(".fp4", _IGNORED, ErrorRange(0.22, 6 * 2.0**-9), 0.00901, lacked_by=_IK),
    "Q1_0": Codec(".few_bits", _IGNORED, _halves(1.00, 1), 0.360),
    "Q2_0": Codec(".few_bits", _IGNORED, _halves(1.00, 2), 0.518, "Q4_0", lacked_by=_IK),
    "Q6_0": Codec(".ik.q6_0", _OPTIONAL, _halves(0.06, 32), 0.000391),
    "Q8_KV": Codec(".ik.q8_kv", _OPTIONAL, _singles(0.05), 6.8e-5),
    "IQ2_K": Codec(".ik.levels.iq_k", _OPTIONAL, _halves(0.60, 8 * 31), 0.0737, "IQ4_NL"),
    "IQ2_KS": Codec(".ik.levels.iq_ks", _OPTIONAL, _halves(0.70, 16 * 31), 0.0914, "IQ4_NL"),
    "IQ2_KL": Codec(".ik.levels.iq2_kl", _OPTIONAL, _halves(0.50, 32 * 63), 0.0497, "IQ4_NL"),
    "IQ3_K": Codec(".ik.levels.iq_k", _OPTIONAL, _halves(0.32, 31 * 63), 0.0167, "IQ4_NL"),
    "IQ3_KS": Codec(".ik.levels.iq_ks", _OPTIONAL, _halves(0.36, 16 * 63), 0.0220, "IQ4_NL"),
    "IQ4_K": Codec(".ik.levels.iq_k", _OPTIONAL, _halves(0.16, 32 * 127), 0.00376, "Q5_0"),
    "IQ4_KS": Codec(".ik.levels.iq_ks", _OPTIONAL, _singles(0.18), 0.00510, "IQ4_NL"),
    "IQ4_KSS": Codec(".ik.levels.iq4_kss", _OPTIONAL, _singles(0.22), 0.00746, "IQ4_NL"),
    "IQ5_K": Codec(".ik.levels.iq_k", _OPTIONAL, _halves(0.08, 32 * 126), 0.000903, "Q6_0"),
    "IQ5_KS": Codec(".ik.levels.iq_ks", _OPTIONAL, _singles(0.10), 0.00122, "Q5_0"),
    "IQ6_K": Codec(".ik.levels.iq_k", _OPTIONAL, _halves(0.04, 128 * 127), 0.000202, "Q8_0"),
    "IQ1_KT": Codec(".ik.trellis.iq_kt", _OPTIONAL, _singles(0.95), 0.140, "IQ4_NL"),
    "IQ2_KT": Codec(".ik.trellis.iq_kt", _OPTIONAL, _singles(0.75), 0.0860, "IQ4_NL"),
    "IQ3_KT": Codec(".ik.trellis.iq_kt", _OPTIONAL, _singles(0.40), 0.0231, "IQ4_NL"),
    "IQ4_KT": Codec(".ik.trellis.iq_kt", _OPTIONAL, _singles(0.22), 0.00733, "IQ4_NL"),
}
"""The rows by the name of the type."""

DECODERS: Mapping[str, str] = {
    "IQ1_S_R4": ".ik.interleaved.iq1_r4",
    "IQ1_M_R4": ".ik.interleaved.iq1_r4",
    "Q8_K_R8": ".ik.interleaved.q8_r8",
    "Q8_KV_R8": ".ik.interleaved.q8_r8",
}
"""The modules of the types that can be decoded but not encoded; a module has DECODERS by name."""

INTERLEAVED: Mapping[str, str] = {
    "Q4_0_R8": "Q4_0",
    "Q5_0_R4": "Q5_0",
    "Q6_0_R4": "Q6_0",
    "Q8_0_R8": "Q8_0",
    "Q2_K_R4": "Q2_K",
    "Q3_K_R4": "Q3_K",
    "Q4_K_R4": "Q4_K",
    "Q5_K_R4": "Q5_K",
    "Q6_K_R4": "Q6_K",
    "IQ2_XXS_R4": "IQ2_XXS",
    "IQ2_XS_R4": "IQ2_XS",
    "IQ2_S_R4": "IQ2_S",
    "IQ3_XXS_R4": "IQ3_XXS",
    "IQ3_S_R4": "IQ3_S",
    "IQ4_NL_R4": "IQ4_NL",
    "IQ4_XS_R8": "IQ4_XS",
    "IQ2_K_R4": "IQ2_K",
    "IQ3_K_R4": "IQ3_K",
    "IQ4_K_R4": "IQ4_K",
    "IQ5_K_R4": "IQ5_K",
    "IQ4_KS_R4": "IQ4_KS",
    "IQ5_KS_R4": "IQ5_KS",
    "BF16_R16": "BF16",
}
"""The types that are their base type, decoded as that once the rows of a group are taken apart."""

REGROUPED: Mapping[str, str] = {**INTERLEAVED, "Q8_KV_R8": "Q8_KV"}
"""All types that regroup their base type's rows; Q8_KV_R8 lacks sums that follow from the codes."""

LOOSE_BASES: Mapping[str, str] = {
    "IQ1_S_R4": "IQ1_S",
    "IQ1_M_R4": "IQ1_M",
    "Q8_K_R8": "Q8_0",
}
"""The types that interleave rows and are no regrouping of another, by the type that ik_llama.cpp takes for
their base (llama-quantize.cpp: interleaved_properties)."""


def codec_of(name: str) -> Codec | None:
    """Return the row of a type, for one that interleaves rows that of its base type; None: there is none."""
    return CODECS.get(name) or CODECS.get(REGROUPED.get(name, name))


def ignores_importances(name: str) -> bool:
    """Return whether the type of that name is encoded without a look at importances."""
    codec = codec_of(name)
    return codec is not None and codec.use is ImportanceUse.IGNORED


def needs_importances(name: str) -> bool:
    """Return whether llama-quantize makes no matrix of that type without importances."""
    codec = codec_of(name)
    return codec is not None and codec.use in (ImportanceUse.NEEDED, ImportanceUse.REQUIRED)


def requires_importances(name: str) -> bool:
    """Return whether the type of that name can't be encoded without importances."""
    codec = codec_of(name)
    return codec is not None and codec.use is ImportanceUse.REQUIRED
