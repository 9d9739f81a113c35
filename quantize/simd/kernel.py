"""How kernels are compiled, with the reason for every JIT option.

nogil         the executor runs kernels in plain threads
error_model   "numpy": a scalar division by zero gives inf as in C, instead of a branch that raises
cache         a kernel is compiled once per machine; see `kernel`
no fastmath   the bytes must not depend on the compiler's liberties
no parallel   the executor owns the cores
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba.core.caching import FunctionCache
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys

from quantize.simd.import_closure import closure_hash
from quantize.simd.inlining import InlinedFunction

Function = TypeVar("Function", bound=Callable[..., Any])

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def inlinable(function: Function) -> Function:
    """Return `function` compiled for the kernels that call it; LLVM decides whether to inline it."""
    compiled: Any = InlinedFunction(function, **OPTIONS)
    return cast("Function", compiled)


def inlined(function: Function) -> Function:
    """Return `function` compiled so that it is always inlined, for the inside of a hot loop.

    LLVM does not inline large functions by itself. A call moves vectors through memory and counts references
    to arrays.
    """
    compiled: Any = InlinedFunction(function, forceinline=True, **OPTIONS)
    return cast("Function", compiled)


class KernelCache(FunctionCache):
    """numba's cache, without loading the compiler before it is known that something has to be compiled.

    numba loads its implementations of all that a function might call, which takes 0.3 s, before it looks into
    the cache. Machine code needs none of them, only the runtime that allocates arrays. Before anything is
    compiled, numba loads them anyway.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)
        return None  # an error that the guard has swallowed


class Kernel(CPUDispatcher):
    """numba's function, compiled without Python's collector of cycles.

    A compiler makes millions of objects that live until it is done. The collector looks at all of them again
    and again, in vain: that was a sixth of the time. Afterwards it goes on as before.
    """

    def compile(self, sig: Any) -> Any:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return super().compile(sig)
        finally:
            if was_enabled:
                gc.enable()


def kernel(function: Function) -> Function:
    """Return `function` compiled, and cached on disk.

    numba drops a cached kernel when the file of the kernel itself changes. Ours call functions of several
    files, so each is stamped with a hash of the import closure of its module. A change to one codec compiles
    that codec's kernels and no other's. Times and version numbers do not count, so an upgrade that leaves
    the kernels as they are compiles nothing.
    """
    dispatcher: Any = Kernel(function, targetoptions={"nopython": True, "boundscheck": None, **OPTIONS})
    dispatcher._cache = KernelCache(function)
    stamp = closure_hash(function.__module__, Path(function.__code__.co_filename))
    dispatcher._cache._cache_file._source_stamp = stamp
    compiled: Function = dispatcher
    return compiled
