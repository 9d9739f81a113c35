"""The table of calibration methods; docs/add-a-method.md adds one."""

from __future__ import annotations

from collections.abc import Mapping

from gguf_tools.errors import BadArgument
from quantize.rounding.methods.base import Matrix, Method, Rates
from quantize.rounding.methods.diagonal import DIAGONAL
from quantize.rounding.methods.feedback import ONE_SIDED, TWO_SIDED

__all__ = ["METHODS", "Matrix", "Method", "Rates", "find_method"]

METHODS: Mapping[str, Method] = {each.name: each for each in (TWO_SIDED, ONE_SIDED, DIAGONAL)}


def find_method(name: str) -> Method:
    """Return the method of a name.

    raises  BadArgument for a name that is not in the table
    """
    if name not in METHODS:
        raise BadArgument(f"calibration method {name!r}: expected one of {', '.join(METHODS)}")
    return METHODS[name]
