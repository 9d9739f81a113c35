"""Who imports whom: every import of a file, wherever in it it stands."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

FLOORS = (
    "gguf_tools", "quantize", "convert", "imatrix.texts", "imatrix.forward", "imatrix", "imatrix.evaluate",
    "imatrix.sensitivities", "imatrix.calibrate", "gguf_tools.commands",
)  # fmt: skip
"""Packages, and rooms of packages, from the ground up: a module imports those of its floor and below."""

SIDE_BY_SIDE = frozenset({"imatrix", "imatrix.evaluate", "imatrix.sensitivities"})
"""Rooms on the same floor: none imports another."""

ROOF = FLOORS[-1]
"""The package of all command lines, above everything."""

PACKAGES = tuple(name for name in FLOORS if "." not in name)


def floor_of(module: str) -> str | None:
    """Return the floor of a module, the most special one that it is in; None for another's module."""
    return max((name for name in FLOORS if f"{module}.".startswith(f"{name}.")), key=len, default=None)


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


COMMAND_HOMES: list[str] = sorted(pyproject()["project"]["scripts"].values())
"""The functions that the installed commands call, as "module:function"."""


@cache
def files_of(folder: str) -> tuple[Path, ...]:
    """Return the modules below a folder of the repository, relative to it."""
    return tuple(sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")))


@cache
def tree_of(path: Path) -> ast.Module:
    """Return what a file of the repository says, parsed once for all that ask."""
    return ast.parse((ROOT / path).read_text())


def name_of(path: Path) -> str:
    """Return the module that a file is."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, also those in functions and under TYPE_CHECKING.

    raises  AssertionError for a relative import
    """
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import on line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if _is_module(inner) else node.module


@cache
def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def top(module: str) -> str:
    return module.partition(".")[0]


def find_circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return modules that import each other in a circle, the first one at both ends; empty without any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []
