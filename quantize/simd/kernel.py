"""How kernels are compiled, with the reason for every JIT option.

nogil         the executor runs kernels in plain threads
error_model   "numpy": a scalar division by zero gives inf as in C, instead of a branch that raises
cache         a kernel is compiled once per machine; see `kernel`
no fastmath   the bytes must not depend on the compiler's liberties
no parallel   the executor owns the cores
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

from quantize.simd.import_closure import closure_hash

Function = TypeVar("Function", bound=Callable[..., Any])

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def inlinable(function: Function) -> Function:
    """Return `function` compiled for the kernels that call it; LLVM decides whether to inline it."""
    compiled: Function = njit(**OPTIONS)(function)
    return compiled


def inlined(function: Function) -> Function:
    """Return `function` compiled so that it is always inlined, for the inside of a hot loop.

    LLVM does not inline large functions by itself. A call moves vectors through memory and counts references
    to arrays.
    """
    compiled: Function = njit(forceinline=True, **OPTIONS)(function)
    return compiled


def kernel(function: Function) -> Function:
    """Return `function` compiled, and cached on disk.

    numba drops a cached kernel when the file of the kernel itself changes. Ours call functions of several
    files, so each is stamped with a hash of the import closure of its module. A change to one codec compiles
    that codec's kernels and no other's. Times and version numbers do not count, so an upgrade that leaves
    the kernels as they are compiles nothing.
    """
    dispatcher: Any = njit(cache=True, **OPTIONS)(function)
    stamp = closure_hash(function.__module__, Path(function.__code__.co_filename))
    dispatcher._cache._cache_file._source_stamp = stamp
    compiled: Function = dispatcher
    return compiled
