"""A hash of all that a module is made of: of its import closure.

A module's closure is the module and, transitively, the modules of its own package and of `quantize` that it
imports where it is loaded, not inside a function. gguf_tools is left out: it holds facts of the file format
and nothing that is compiled.

The hash is of the code that Python makes of these files, without comments, docstrings and line numbers, so
an edit of prose leaves it alone. Compiling a file costs a tenth of what parsing it into a syntax tree does,
and kernels are imported at the start of every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from opcode import opmap
from pathlib import Path
from types import CodeType

_ROOT = Path(__file__).parents[2]
"""The folder that holds the packages."""


def closure_hash(name: str, path: Path) -> str:
    """Return the hash of the closure of the module `name` in the file `path`."""
    digest = sha256()
    for source in sorted(_closure(name, path)):
        digest.update(_hash_of_code(source).encode())
    return digest.hexdigest()


def _closure(name: str, path: Path) -> set[Path]:
    packages = frozenset({"quantize", name.partition(".")[0]})
    closure = {path}
    waiting = [path]
    while waiting:
        new = _imports(waiting.pop(), packages) - closure
        closure |= new
        waiting += new
    return closure


@cache
def _imports(path: Path, packages: frozenset[str]) -> frozenset[Path]:
    """Return the files of the modules of `packages` that a file imports.

    A name with a dot in it can only be an imported module's; a package's own name (`import quantize`) is not
    followed. What `from package.folder import name` imports may be a module, so all names are tried as such.
    """
    names = _code(path).co_names
    imported = set()
    for name in names:
        package, dot, _ = name.partition(".")
        if dot and package in packages and (file := _file_of(name)):
            imported.add(file)
            if file.name == "__init__.py":
                imported.update(filter(None, (_file_of(f"{name}.{other}") for other in names)))
    return frozenset(imported)


def _file_of(name: str) -> Path | None:
    """Return the file of a module, or None if there is none of this name."""
    stem = _ROOT.joinpath(*name.split("."))
    candidates = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


@cache
def _code(path: Path) -> CodeType:
    """Return the code of a file, without docstrings and assertions."""
    return compile(path.read_bytes(), "", "exec", dont_inherit=True, optimize=2)


@cache
def _hash_of_code(path: Path) -> str:
    digest = sha256()
    for fact in _facts(_code(path)):
        digest.update(repr(fact).encode())
    return digest.hexdigest()


def _facts(value: object) -> Iterator[object]:
    """Yield all that decides what a code object does, or the constant itself."""
    if isinstance(value, CodeType):
        yield _without_nops(value.co_code), value.co_flags, value.co_argcount, value.co_posonlyargcount
        yield value.co_kwonlyargcount, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
        for constant in value.co_consts:
            yield from _facts(constant)
    elif isinstance(value, frozenset):
        yield sorted(map(repr, value))  # their own order is another one in each process
    else:
        yield value


def _without_nops(code: bytes) -> bytes:
    """Return bytecode without the instructions that stand for docstrings of constants."""
    if opmap["NOP"] not in code:
        return code
    return b"".join(code[i : i + 2] for i in range(0, len(code), 2) if code[i] != opmap["NOP"])
