"""The codecs, one module per ggml type, found by name in the table of codecs.py.

A module is imported when its format is first asked for: listing the names costs nothing, and numba is
loaded by a run that encodes, not by one that prints a plan.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gguf_tools.errors import QuantError
from gguf_tools.ggml_types import GGMLType
from quantize.formats.codecs import CODECS

if TYPE_CHECKING:
    from quantize.formats.base import QuantFormat


def available() -> tuple[str, ...]:
    """Return the names of the types that can be encoded and decoded."""
    return tuple(CODECS)


def get_format(type_: str | GGMLType) -> QuantFormat:
    """Return the codec of a ggml type, given the type or its name in any case.

    raises   QuantError for a type without a codec
    """
    name = type_.name if isinstance(type_, GGMLType) else type_.upper()
    if name not in CODECS:
        raise QuantError(f"{name}: no codec for this type; there are {', '.join(CODECS)}")
    format_: QuantFormat = import_module(CODECS[name].module, __package__).FORMAT
    return format_
