"""The import closure of a module: what it is made of, as one hash.

A module's closure is the module and, transitively, the modules of its own package and of `quantize` that it
imports where it is loaded, not inside a function. gguf_tools is left out: it holds facts of the file format
and nothing that is compiled.

Kernels are imported at the start of every run, so imports are found by their looks: parsing the files of
three codecs would take 25 ms, and this takes two.
"""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha256
from pathlib import Path

_ROOT = Path(__file__).parents[2]
"""The folder that holds the packages."""

_IMPORT = re.compile(r"^from ([\w.]+) import (\([^)]*\)|.*)", re.MULTILINE)
"""An import statement at the start of a line. Text that looks like one adds a file, which does no harm."""


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
