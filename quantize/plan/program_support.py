"""Which program reads which type: llama.cpp and ik_llama.cpp share most, and each lacks some of the other's.

A file with types of both kinds can be read by neither. What ik_llama.cpp lacks is what its ggml.h lacks, in
8337e4c (2026-08-15); MXFP4 and Q1_0 (as Q1_0_G128) are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gguf_tools.format.ggml_types import TYPES, GGMLType, by_name
from quantize.formats.codecs import CODECS
from quantize.plan.recipe_files import Mixture
from quantize.roles import Program

_FIRST_OF_IK = 97
"""The lowest id that ik_llama.cpp chose to stay out of llama.cpp's way."""

LACKED_BY: Mapping[Program, frozenset[str]] = {
    "llama.cpp": frozenset(type_.name for type_ in TYPES if type_.id >= _FIRST_OF_IK) | {"I2_S"},
    "ik_llama.cpp": frozenset(name for name, codec in CODECS.items() if codec.lacked_by == "ik_llama.cpp"),
}
"""Names of the types that a program does not know."""


def only_in_ik(mixture: Mixture) -> GGMLType | None:
    """Return a type that a mixture names and that only ik_llama.cpp reads; None if there is none."""
    return next((type_ for type_ in _named(mixture) if type_.name in LACKED_BY["llama.cpp"]), None)


def _named(mixture: Mixture) -> Iterator[GGMLType]:
    options = mixture.options
    if mixture.recipe.default is not None:
        yield by_name(mixture.recipe.default)
    yield from (rule.type for rule in (*options.overrides, *options.fallbacks))
    yield from (type_ for type_ in (options.output_type, options.embedding_type) if type_ is not None)
