"""Settings of libraries that hold for the whole process, and that several parts of it want at the same time.

BLAS: OpenBLAS, which numpy's wheels bring along, multiplies and factorizes with as many threads as there are
cores, whichever thread calls it. Threads that call it at the same time then wait for each other: 12 factors
of 1024 columns, in two threads on two busy cores, took 7.5 CPU seconds in place of 0.5. And a factorization
is cut by the number of threads, so its last digits differ between machines.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy
from numpy.linalg import lapack_lite

Value = TypeVar("Value")


class SharedContext:
    """A context that is opened by the first who enters, and closed by the last who leaves, in any order."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make, self._lock, self._n_inside = make, Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._n_inside:
                self._opened = self._make()
                self._opened.__enter__()
            self._n_inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._n_inside -= 1
            if not self._n_inside:
                self._opened.__exit__(None, None, None)


def shared_setting(get: Callable[[], Value], put: Callable[[Value], object], value: Value) -> SharedContext:
    """Return a context in which a setting has a value, and after which it is as before."""

    @contextmanager
    def setting() -> Iterator[None]:
        before = get()
        put(value)
        try:
            yield
        finally:
            put(before)

    return SharedContext(setting)


_BLAS_NAMES = (
    "scipy_openblas_{}_num_threads64_",
    "openblas_{}_num_threads64_",
    "scipy_openblas_{}_num_threads",
    "openblas_{}_num_threads",
)
"""Names of functions in the OpenBLAS of numpy's wheels, and in those of other builds."""


def _blas(what: str) -> Callable[..., Any]:
    """Return the function of numpy's OpenBLAS that gets or sets its number of threads; of another library, a
    function that does nothing."""
    beside = Path(numpy.__file__).parents[1].glob("numpy.libs/*openblas*")
    # A module of numpy that is linked with it has its functions too, but not in Windows.
    libraries = (ctypes.CDLL(str(path)) for path in chain([lapack_lite.__file__], beside))
    found = (getattr(library, name.format(what), None) for library in libraries for name in _BLAS_NAMES)
    return next((each for each in found if each is not None), lambda *_: 1)


ONE_BLAS_THREAD = shared_setting(lambda: int(_blas("get")()), lambda n_threads: _blas("set")(n_threads), 1)
"""numpy's linear algebra in one thread, where there are threads of our own."""
