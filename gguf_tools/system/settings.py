"""Settings of libraries that hold for the whole process, and that several parts of it want at the same time.

BLAS: OpenBLAS, which numpy's wheels bring along, multiplies and factorizes with as many threads as there are
cores, whichever thread calls it. Threads that call it at the same time then wait for each other: 12 factors
of 1024 columns, in two threads on two busy cores, took 7.5 CPU seconds in place of 0.5. And a factorization
is cut by the number of threads, so its last digits differ between machines.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy.linalg

Value = TypeVar("Value")


class SharedSetting(Generic[Value]):
    """A context manager that gives a setting a value until the last who entered has left, in any order."""

    def __init__(self, get: Callable[[], Value], put: Callable[[Value], object], value: Value) -> None:
        self._get, self._put, self._value, self._before = get, put, value, value
        self._lock, self._n_inside = Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._n_inside:
                self._before = self._get()
                self._put(self._value)
            self._n_inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._n_inside -= 1
            if not self._n_inside:
                self._put(self._before)


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
    library = ctypes.CDLL(numpy.linalg._umath_linalg.__file__)
    found = (getattr(library, name.format(what), None) for name in _BLAS_NAMES)
    return next((each for each in found if each is not None), lambda *_: 1)


ONE_BLAS_THREAD = SharedSetting(lambda: int(_blas("get")()), lambda n_threads: _blas("set")(n_threads), 1)
"""numpy's linear algebra in one thread, where there are threads of our own."""
