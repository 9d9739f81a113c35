"""The codecs, one module per kind of ggml types, found by name in the tables of codecs.py.

A module is imported when its format is first asked for: listing the names costs nothing, and numba is
loaded by a run that encodes, not by one that prints a plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf_tools.errors import QuantError
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.lazy import late
from quantize.formats.codecs import CODECS, DECODERS, INTERLEAVED, REGROUPED

if TYPE_CHECKING:
    from quantize.formats.base import Decode, QuantFormat


def available() -> tuple[str, ...]:
    """Return the names of the types that have a codec of their own; see `encodable`."""
    return tuple(CODECS)


def encodable() -> tuple[str, ...]:
    """Return the names of the types that can be encoded: `available`, and what interleaves their rows."""
    return (*CODECS, *(name for name, base in REGROUPED.items() if base in CODECS and name not in CODECS))


def decodable() -> tuple[str, ...]:
    """Return the names of the types that can be decoded: `available`, and more."""
    return (*CODECS, *DECODERS, *INTERLEAVED)


def get_format(type_: str | GGMLType) -> QuantFormat:
    """Return the codec of a ggml type, given the type or its name in any case.

    raises   QuantError for a type without a codec
    """
    name = _name_of(type_)
    if name not in CODECS and REGROUPED.get(name) in CODECS:
        interleaved: QuantFormat = late(".ik.interleaved.interleaved", __package__).codec(name)
        return interleaved
    if name not in CODECS:
        lacking = "encoder" if name in decodable() else "codec"
        raise QuantError(f"{name}: no {lacking} for this type")
    formats: tuple[QuantFormat, ...] = late(CODECS[name].module, __package__).FORMATS
    return next(format_ for format_ in formats if format_.type.name == name)


def get_decoder(type_: str | GGMLType) -> Decode:
    """Return the decoder of a ggml type, given the type or its name in any case.

    raises   QuantError for a type without a codec and without a decoder
    """
    name = _name_of(type_)
    if name in CODECS:
        return get_format(name).decode
    decode: Decode
    if name in INTERLEAVED:
        decode = late(".ik.interleaved.interleaved", __package__).decoder(name)
        return decode
    if name not in DECODERS:
        raise QuantError(f"{name}: no codec for this type")
    decode = late(DECODERS[name], __package__).DECODERS[name]
    return decode


def _name_of(type_: str | GGMLType) -> str:
    return type_.name if isinstance(type_, GGMLType) else type_.upper()
