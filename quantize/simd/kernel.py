"""How kernels are compiled, with the reason for every JIT option, and when a cached one is stale.

nogil         the executor runs kernels in plain threads
error_model   "numpy": a scalar division by zero gives inf as in C, instead of a branch that raises
cache         a kernel is compiled once per machine; see `kernel` and kernel_cache.py
no fastmath   the bytes must not depend on the compiler's liberties
no parallel   the executor owns the cores

A cached kernel is stale when its module's import closure has changed: the module and, transitively, the
modules of its own package and of `quantize` that it imports where it is loaded, not inside a function.
gguf_tools is left out: it holds facts of the file format and nothing that is compiled. Kernels are imported
at the start of every run, so imports are found by their looks: parsing the files of three codecs would take
25 ms, and this takes two.

Functions that only kernels call are compiled to LLVM's intermediate code, and no further. numba makes machine
code of every function that it compiles, and wrappers for callers in Python and C. Ours become part of the
kernels that call them, so nobody ever runs that code. Here a function ends as intermediate code, optimised by
itself, which the kernels link and optimise whole. Most of what is left is numba's own work in Python, so
passes that change nothing are left out. Kernels are compiled in half the time, and are as fast as before.
(Without optimising the functions by themselves, IQ2_XXS would lose 15 % of its speed.)

Where LLVM has not inlined such a function, a kernel keeps it under its symbol: the qualified name and a
counter of the process. A kernel from the cache brings the symbols of the process that compiled it. So two
functions that one factory made, for two formats, could meet under the same symbol, and one would be called in
the place of the other. A mark of the process in the name prevents that.
"""

from __future__ import annotations

import gc
import re
import secrets
from collections.abc import Callable
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher

from quantize.simd.kernel_cache import kernel_cache

_ROOT = Path(__file__).parents[2]
"""The folder that holds the packages."""

_IMPORT = re.compile(r"^from ([\w.]+) import (\([^)]*\)|.*)", re.MULTILINE)
"""An import statement at the start of a line. Text that looks like one adds a file, which does no harm."""


@cache
def closure_hash(name: str, path: Path) -> str:
    """Return the hash of the closure of the module `name` in the file `path`."""
    packages = frozenset({"quantize", name.partition(".")[0]})
    closure = {path}
    waiting = [path]
    while waiting:
        new = _imports(waiting.pop(), packages) - closure
        closure |= new
        waiting += new
    digest = sha256()
    for source in sorted(closure):
        digest.update(sha256(_text(source).encode()).digest())
    return digest.hexdigest()


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _imports(path: Path, packages: frozenset[str]) -> frozenset[Path]:
    """Return the files of the modules of `packages` that a file imports.

    A name that is imported from a folder may be a module of it.
    """
    files = set()
    for module, names in _IMPORT.findall(_text(path)):
        if module.partition(".")[0] in packages:
            candidates = [module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))]
            files |= {file for candidate in candidates if (file := _file_of(candidate))}
    return frozenset(files)


@cache
def _file_of(name: str) -> Path | None:
    """Return the file of a module, or None if there is none of this name."""
    stem = _ROOT.joinpath(*name.split("."))
    candidates = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


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
    files, so each is stamped with a hash of the import closure of its module. A change to one module
    compiles its kernels and no others. Times and version numbers do not count, so an upgrade that leaves
    the kernels as they are compiles nothing.
    """
    dispatcher: Any = Kernel(function, targetoptions={"nopython": True, "boundscheck": None, **OPTIONS})
    stamp = closure_hash(function.__module__, Path(function.__code__.co_filename))
    dispatcher._cache = kernel_cache(function, stamp)
    compiled: Function = dispatcher
    return compiled


def kernel_of(part: Callable[..., Any], function: Function) -> Function:
    """Return `function`, which a decorator has made around `part`, as a kernel of the module of `part`.

    It bears the name of `part`, is kept beside it, and is stale when the closure of its module changes.
    """
    where = part.__code__
    function.__code__ = function.__code__.replace(
        co_filename=where.co_filename, co_firstlineno=where.co_firstlineno
    )
    function.__module__, function.__name__ = part.__module__, part.__name__
    function.__qualname__ = part.__name__
    return kernel(function)
