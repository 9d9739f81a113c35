"""How kernels are compiled: every JIT option of this package, once, with its reason.

nogil         the executor runs kernels in plain threads
error_model   "numpy": a scalar division by zero gives inf as in C, instead of a branch that raises
cache         a kernel is compiled once per machine; see `kernel`
no fastmath   the bytes must not depend on the compiler's liberties
no parallel   the executor owns the cores
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from quantize.simd.import_closure import closure_hash

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def part(function: Callable[..., Any]) -> Any:
    """Return `function` compiled as a part of the kernels that call it."""
    return njit(**OPTIONS)(function)


def inner_part(function: Callable[..., Any]) -> Any:
    """Return `function` compiled as a part that is always inlined: the inside of a hot loop.

    LLVM leaves large functions alone. A call moves vectors through memory and counts references to arrays.
    """
    return njit(forceinline=True, **OPTIONS)(function)


def kernel(function: Callable[..., Any]) -> Any:
    """Return `function` compiled, and cached on disk.

    numba drops a cached kernel when the file of the kernel itself changes. Ours are made of parts from
    several files, so the mark of freshness is a hash of the import closure of the kernel's module: a change
    to one codec compiles that codec's kernels and no other's. Times and version numbers are no part of it,
    so an upgrade that leaves the kernels as they are compiles nothing.
    """
    dispatcher = njit(cache=True, **OPTIONS)(function)
    stamp = closure_hash(function.__module__, Path(function.__code__.co_filename))
    dispatcher._cache._cache_file._source_stamp = stamp
    return dispatcher
