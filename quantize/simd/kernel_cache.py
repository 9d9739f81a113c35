"""Where compiled kernels are kept, and how much a kept one is trusted.

What is kept is machine code in a pickle, which runs here with all that this user may do. So a place and its
files must belong to this user, to root, or to the owner of the source, who could change what runs anyway, and
nobody else may write there. Places are tried in this order:

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

import os
import pickle
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import xxhash
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
    if not stat.S_ISDIR(status.st_mode) or (_user(), 0) != (status.st_uid, status.st_mode & 0o077):
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


_told: set[str] = set()


def _tell(text: str) -> None:
    """Say something about the place of kernels, unless something has been said already."""
    if not _told:
        _told.add(text)
        teller(quiet=False)(Finding("kernels", text, Level.NOTE))
