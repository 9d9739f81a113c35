"""The wheel's shared object: where it is, how its functions are declared, and what it logs.

Each module beside this one declares the functions that it calls, and gets the library from `declared`.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Signatures = Mapping[str, tuple[Any, Sequence[Any]]]
"""Functions by name: the type of the result, and those of the arguments."""

LOG_LIMIT = 2000
"""Number of lines of llama.cpp's log that are kept for error messages."""

LOG: list[str] = []
"""llama.cpp's latest log lines: it explains a refusal there and returns NULL."""


@cache
def shared_object() -> Path | None:
    """Return the wheel's library, None if the wheel is not installed."""
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("xllamacpp*.so"), None)


def available() -> bool:
    """Return whether the wheel is installed."""
    return shared_object() is not None


def declared(signatures: Signatures) -> c.CDLL:
    """Return the library with some of its functions declared; raises RuntimeError without the wheel."""
    lib = _library()
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    return lib


@cache
def _library() -> c.CDLL:
    """Return the library with its log silenced."""
    path = shared_object()
    if path is None:
        raise RuntimeError("the oracle needs the xllamacpp wheel: pip install '.[test]'")
    lib = c.CDLL(str(path))
    lib.llama_log_set.restype, lib.llama_log_set.argtypes = None, [c.c_void_p, c.c_void_p]
    lib.llama_backend_init.restype, lib.llama_backend_init.argtypes = None, []
    lib.llama_log_set(_keep_log, None)
    lib.llama_backend_init()
    return lib


@c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
def _keep_log(_level: int, text: bytes, _user: int) -> None:
    LOG.append(text.decode(errors="replace"))
    del LOG[:-LOG_LIMIT]
