"""How kernels are compiled, with the reason for every JIT option, where they are kept, and when one is stale.

nogil         the executor runs kernels in plain threads
error_model   "numpy": a scalar division by zero gives inf as in C, instead of a branch that raises
cache         a kernel is compiled once per machine; see `kernel` and the end of this text
no fastmath   the bytes must not depend on the compiler's liberties
no parallel   the executor owns the cores

A cached kernel is stale when its module's import closure has changed: the module and, transitively, the
modules of its own package and of `quantize` that it imports where it is loaded, not inside a function.
gguf_tools is left out: it holds facts of the file format and nothing that is compiled. Kernels are imported
at the start of every run, so imports are found by their looks: parsing the files of three codecs would take
25 ms, and this takes two.

Functions that only kernels call are compiled to LLVM's intermediate code, and no further. numba makes
machine code of every function that it compiles, and wrappers for callers in Python and C. Ours become part
of the kernels that call them, so nobody ever runs that code. Here a function ends as intermediate code,
optimised by itself, which the kernels link and optimise whole. Most of what is left is numba's own work in
Python, so passes that change nothing are left out. Kernels are compiled in half the time, and are as fast
as before. (Without optimising the functions by themselves, IQ2_XXS would lose 15 % of its speed.)

Where LLVM has not inlined such a function, a kernel keeps it under its symbol: the qualified name and a
counter of the process. A kernel from the cache brings the symbols of the process that compiled it. So two
functions that one factory made, for two formats, could meet under the same symbol, and one would be called
in the place of the other. A mark of the process in the name prevents that.

What is kept of compiled kernels is machine code in a pickle, which runs here with all that this user may
do. So a place and its files must belong to this user, to root, or to the owner of the source, who could
change what runs anyway, and nobody else may write there. Places are tried in this order:

    NUMBA_CACHE_DIR          where the user says
    __pycache__              beside the source
    ~/.cache/numba           as numba has it, by system
    TMP/gguf-tools-kernels-UID

A process without any of them compiles for itself. Where a kernel had to be compiled and is kept elsewhere
than the user said, in the last place or nowhere, a note says so, once. A file begins with a digest of the
rest: after a crash of the machine or a failure of the disk, machine code may have any bytes. A damaged file
counts as missing, so the kernel is compiled again, and its file replaced.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import re
import secrets
import stat
import tempfile
from collections.abc import Callable
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import xxhash
from numba import njit
from numba.core import config
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    InTreeCacheLocator,
    NullCache,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
)
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys

from gguf_tools.findings import Finding, Level, teller
from gguf_tools.system.files import NO_WAIT, open_file


class _Trusted:
    """Leaves out a place that others may write to."""

    @classmethod
    def from_function(cls, function: Callable[..., Any], source: str) -> Any:
        """See numba; None: another place is to be tried."""
        try:
            found: Any = super().from_function(function, source)  # type: ignore[misc]
            if found is not None and _is_trusted(os.stat(found.get_cache_path()), source):
                return found
        except (OSError, ValueError):  # what is there is a file, or no name of one
            pass
        return None


class _Named(_Trusted, UserProvidedCacheLocator):
    """The place that NUMBA_CACHE_DIR names."""


class _InTree(_Trusted, InTreeCacheLocator):
    """The place beside the source."""


class _OfUser(_Trusted, UserWideCacheLocator):
    """The place in the user's folder of caches."""


class _Temporary(_Trusted, UserWideCacheLocator):
    """A folder for this user among the temporary ones, which may not outlive the machine's next start."""

    def get_cache_path(self) -> str:
        return os.path.join(_temporary_folder(), self.get_suitable_cache_subpath(self._py_file))


def _temporary_folder() -> str:
    """Make the folder in which only this user can write; raises OSError."""
    folder = Path(tempfile.gettempdir(), f"gguf-tools-kernels-{_user()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    others = status.st_mode & 0o077 if hasattr(os, "geteuid") else 0  # Windows shows all as open to all
    if not stat.S_ISDIR(status.st_mode) or (_user(), 0) != (status.st_uid, others):
        raise FileExistsError(f"{folder} belongs to somebody else")
    return str(folder)


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _is_trusted(status: os.stat_result, source: str) -> bool:
    """Whether only those can have written a file, or can write to a folder, whose code this process runs."""
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid in {_user(), 0, _owner(source)} and not status.st_mode & stat.S_IWOTH


@cache
def _owner(source: str) -> int:
    return os.stat(source).st_uid


class _Places(CompileResultCacheImpl):
    """Finds the place of a kernel; RuntimeError: there is none."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._locator_classes = [_Named, _InTree, _OfUser, _Temporary]
        super().__init__(function)


class _SealedFiles(IndexDataCacheFile):
    """The index of a kernel and its machine code, each behind a digest of it and of what it was made of."""

    def __init__(self, places: _Places, stamp: str, source: str) -> None:
        super().__init__(places.locator.get_cache_path(), places.filename_base, stamp)
        self._source = source

    def _load_index(self) -> dict[Any, str]:
        return self._read(self._index_path) or {}

    def _save_index(self, overloads: dict[Any, str]) -> None:
        self._write(self._index_path, overloads)

    def _load_data(self, name: str) -> Any:
        return self._read(self._data_path(name))

    def _save_data(self, name: str, data: Any) -> None:
        self._write(self._data_path(name), data)

    def _read(self, path: str) -> Any:
        """Return the content of a file; None for one that is missing, stale, damaged or not to be trusted."""
        try:
            with open(open_file(path, os.O_RDONLY | NO_WAIT), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or not _is_trusted(status, self._source):
                    return None
                digest, data = file.read(_DIGEST_BYTES), file.read()
            return pickle.loads(data) if digest == self._digest(data) else None
        except (OSError, ImportError, AttributeError):  # or it names a class that has another home now
            return None

    def _write(self, path: str, what: Any) -> None:
        data = self._dump(what)
        with self._open_for_write(path) as file:
            file.write(self._digest(data) + data)

    def _digest(self, data: bytes) -> bytes:
        """Return the digest at a file's start; another one under another version, or of other sources."""
        return xxhash.xxh3_128_digest(f"{self._version} {self._source_stamp} ".encode() + data)


_DIGEST_BYTES = 16


class KernelCache(FunctionCache):
    """numba's cache, without loading the compiler before it is known that something has to be compiled.

    numba loads its implementations of all that a function might call, which takes 0.3 s, before it looks into
    the cache. Machine code needs none of them, only the runtime that allocates arrays. Before anything is
    compiled, numba loads them anyway.

    places  where it is
    stamp   what the kernel is made of
    """

    def __init__(self, function: Callable[..., Any], places: _Places, stamp: str) -> None:
        self._name, self._py_func, self._impl = repr(function), function, places
        self._cache_path = places.locator.get_cache_path()
        self._cache_file = _SealedFiles(places, stamp, function.__code__.co_filename)
        self.enable()

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Return signature and machine of a kernel's code; what it closes over follows from the sources."""
        return sig, codegen.magic_tuple()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)
        return self._load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _tell(f"compiled kernels can't be kept in {self._cache_path} ({error.strerror}): {_NEXT_TIME}")
        else:
            named = getattr(config, "CACHE_DIR", "")
            if named and not isinstance(self._impl.locator, _Named):
                _tell(f"NUMBA_CACHE_DIR ({named}) can't be used: {self._kept}")
            elif isinstance(self._impl.locator, _Temporary):
                _tell(f"no other place can be written: {self._kept}; NUMBA_CACHE_DIR names another one")

    @property
    def _kept(self) -> str:
        return f"compiled kernels are kept in {Path(self._cache_path).parent}"


class _NoCache(NullCache):
    """Cache of a kernel that is kept nowhere."""

    def load_overload(self, sig: Any, target_context: Any) -> None:
        rtsys.initialize(target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        _tell(f"there is no place to keep compiled kernels: {_NEXT_TIME}")


_NEXT_TIME = "each run compiles them again; NUMBA_CACHE_DIR names a folder for them"


def kernel_cache(function: Callable[..., Any], stamp: str) -> Any:
    """Return the cache of a kernel.

    stamp  what the kernel is made of: one that is kept under another stamp is stale
    """
    try:
        return KernelCache(function, _Places(function), stamp)
    except (RuntimeError, OSError):
        return _NoCache()


if (_own := logging.getLogger("numba")).level == logging.NOTSET:
    _own.setLevel(logging.WARNING)  # it writes a line for each step of its compiler where a caller logs all


_told: set[str] = set()


def _tell(text: str) -> None:
    """Say something about the place of kernels, unless something has been said already."""
    if not _told:
        _told.add(text)
        teller(quiet=False)(Finding("kernels", text, Level.NOTE))


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
