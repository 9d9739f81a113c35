"""Names that tell the functions of one factory apart.

A function's symbol is its qualified name and a counter of the process that compiled it. A kernel from the
cache brings the symbols of another process, so two functions that one factory made for two formats can meet
under the same symbol, and the first one would be taken for both. A name for each use of a factory prevents
that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from quantize.simd.kernel import inlinable

Function = TypeVar("Function", bound=Callable[..., Any])


def inlinable_for(name: str) -> Callable[[Function], Function]:
    """Return `inlinable` for the functions that a factory makes for `name`, a format or a part of one."""

    def compile_as(function: Function) -> Function:
        function.__qualname__ = f"{function.__qualname__}.{name}"
        return inlinable(function)

    return compile_as
