"""How functions that only kernels call are compiled: to LLVM's intermediate code, and no further.

numba makes machine code of every function that it compiles, and wrappers for callers in Python and C. Ours
become part of the kernels that call them, so nobody ever runs that code. Here a function ends as intermediate
code, optimised by itself, which the kernels link and optimise whole. Most of what is left is numba's own work
in Python, so passes that change nothing are left out. Kernels are compiled in half the time, and are as fast
as before. (Without optimising the functions by themselves, IQ2_XXS would lose 15 % of its speed.)

Where LLVM has not inlined such a function, a kernel keeps it under its symbol: the qualified name and a
counter of the process. A kernel from the cache brings the symbols of the process that compiled it. So two
functions that one factory made, for two formats, could meet under the same symbol, and one would be called in
the place of the other. A mark of the process in the name prevents that.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import cached_property
from typing import Any

from numba import njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher

_PASSES_WITHOUT_EFFECT = frozenset(
    {
        "with_lifting", "inline_closure_likes", "make_function_op_code_to_jit_function", "inline_inlinables",
        "find_literally", "literal_unroll", "inline_overloads", "nopython_rewrites",
        "nopython_supported_feature_validation",
    }
)  # fmt: skip
"""Passes of numba's compiler for what such functions don't have: with-blocks, closures and comprehensions,
literally() and literal_unroll(), expressions on whole arrays. Each takes a walk through the function."""

_PROCESS = secrets.token_hex(8)
"""The mark of this process in symbols."""


class _IntermediateLibrary(JITCodeLibrary):
    """The code of one function, for linking only."""

    def _optimize_final_module(self) -> None:
        """Leave this to the kernel, which numba optimises with all that it links."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> _IntermediateLibrary:
        return self

    def set_env(self, name: str, environment: object) -> None:
        """Do nothing: there is no machine code that could look for its environment."""


class _InliningCompiler(Compiler):
    """numba's compiler of a function, with an _IntermediateLibrary for the result."""

    def define_pipelines(self) -> list[Any]:
        self.state.library = _IntermediateLibrary(self.state.targetctx.codegen(), "inlined")
        pipelines: list[Any] = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [
                (each, text) for each, text in pipeline.passes if each.name() not in _PASSES_WITHOUT_EFFECT
            ]
            # The order of passes is fixed, so there is no need to analyse all variables anew after each one.
            pipeline._ENFORCING = False
            pipeline.finalize()
        return pipelines


class InlinedFunction(CPUDispatcher):
    """A function for kernels. A call from Python compiles it once more, as numba does it."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._options = options
        function.__qualname__ += f".{_PROCESS}"
        super().__init__(
            py_func=function,
            targetoptions={
                "nopython": True, "boundscheck": None, "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
                **options,
            },
            pipeline_class=_InliningCompiler,
        )  # fmt: skip

    @cached_property
    def _for_python(self) -> Any:
        return njit(**self._options)(self.py_func)

    def __call__(self, *args: Any) -> Any:
        return self._for_python(*args)

    def inspect_llvm(self, signature: Any = None) -> Any:
        """Return the code of calls from Python, by signature, as numba's functions do."""
        return self._for_python.inspect_llvm(signature)
