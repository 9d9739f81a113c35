"""Imports point down, never in a circle; commands start without anything heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from scripts.check.house import (
    circles_of_folders,
    imports_by_string,
    names_by_string,
    private_names_of_others,
)
from tests.contract.import_graph import (
    COMMAND_HOMES,
    FLOORS,
    PACKAGES,
    ROOF,
    ROOT,
    SIDE_BY_SIDE,
    files_of,
    find_circle,
    floor_of,
    imports_of,
    name_of,
    top,
    tree_of,
)

MODULES = [path for package in PACKAGES for path in files_of(package)]
TESTS = files_of("tests")
FILES_OF_TESTS = {name_of(path): path for path in TESTS}
COMMANDS = [home.partition(":")[0] for home in COMMAND_HOMES]
HEAVY = ["numba", "torch", "transformers", "llvmlite", "huggingface_hub"]

FLOOR_OF_TESTS = {
    "tests.support": "gguf_tools",
    "tests.naive": "quantize",
    "tests.imatrix.sensitivities": "imatrix.calibrate",
}
"""Floors of folders of tests that are not named after theirs; sensitivities are judged by its gradients."""


def above(floor: str | None) -> set[str]:
    """Return the floors whose modules one floor must not import: those above it and beside it."""
    assert floor is not None
    beside = SIDE_BY_SIDE - {floor} if floor in SIDE_BY_SIDE else set()
    return {*FLOORS[FLOORS.index(floor) + 1 :], *beside}


def is_front(path: Path) -> bool:
    """Whether a module is a package's front, which offers what is in the package's rooms."""
    return name_of(path) in PACKAGES or path.name == "__main__.py"


def on_floors(modules: Iterable[str], floors: set[str]) -> list[str]:
    return sorted(module for module in modules if floor_of(module) in floors)


def test_imports_point_down() -> None:
    """Only `python -m PACKAGE` reaches the roof from below."""
    up = {
        str(path): found
        for path in MODULES
        if not is_front(path) and (found := on_floors(imports_of(path), above(floor_of(name_of(path)))))
    }
    assert up == {}


def test_packages_never_import_tests_or_what_tests_need() -> None:
    foreign = {"tests", "scripts", "pytest", "hypothesis", "xllamacpp", "gguf", "transformers"}
    assert {str(path): found for path in MODULES if (found := importing(path, foreign))} == {}


def importing(path: Path, packages: set[str]) -> list[str]:
    return sorted(module for module in imports_of(path) if top(module) in packages)


def test_names_of_other_libraries_are_public() -> None:
    assert private_names_of_others() == []


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {}
    for path in MODULES:
        name = name_of(path)
        graph[name] = {module for module in imports_of(path) if top(module) in PACKAGES}
    assert find_circle(graph) == []


def test_what_a_folder_holds_imports_each_other_in_no_circle() -> None:
    """Folders and modules, each as a whole."""
    assert circles_of_folders() == []


def test_modules_are_imported_by_a_string_in_one_place() -> None:
    """A table names modules as strings, too: none that is above the table's."""
    assert (imports_by_string(), names_by_string()) == ([], [])


def test_one_module_asks_a_package_for_a_name_from_above() -> None:
    """A package's stub has names of all floors, so importing one of them from there could hide the floor."""
    up = {
        str(path): found
        for path in MODULES
        if not is_front(path)
        and (found := on_floors(asked_of_packages(path), above(floor_of(name_of(path)))))
    }
    assert up == {"gguf_tools/format/reader.py": ["quantize.arrays"]}


def asked_of_packages(path: Path) -> Iterator[str]:
    """Yield where the public names are defined that a file imports from packages with a stub."""
    for package, name in names_imported_by(path):
        yield from (home for home, public in names_imported_by(stub_of(package)) if public == name)


def stub_of(package: str) -> Path:
    return Path(*package.split("."), "__init__.pyi")


def names_imported_by(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import from a module; nothing for a file that isn't there."""
    for node in ast.walk(tree_of(path)) if (ROOT / path).is_file() else ():
        if isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_a_circle_is_found() -> None:
    assert find_circle({"a": ["b"], "b": ["c", "d"], "d": ["b"]}) in (["b", "d", "b"], ["d", "b", "d"])


def test_tests_of_a_package_do_without_those_above_it() -> None:
    """Its command is how a user reaches a package, so any test may call one."""
    up = {}
    for path in TESTS:
        folder = f"{name_of(path.parent)}."
        named = (floor for other, floor in FLOOR_OF_TESTS.items() if folder.startswith(f"{other}."))
        floor = next(named, None) or floor_of(folder.removeprefix("tests."))
        if floor is not None:
            found = on_floors(reached_by_test(path, {path}), above(floor) - {ROOF})
            if found:
                up[str(path)] = sorted(found)
    assert up == {}


def reached_by_test(path: Path, seen: set[Path]) -> Iterator[str]:
    """Yield what a test imports, also through other modules of the tests."""
    for module in imports_of(path):
        yield module
        inner = FILES_OF_TESTS.get(module)
        if inner is not None and inner not in seen:
            seen.add(inner)
            yield from reached_by_test(inner, seen)


@pytest.mark.parametrize("module", COMMANDS)
def test_importing_a_command_loads_nothing_heavy(module: str) -> None:
    probe = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    command = [sys.executable, "-c", probe]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_what_scripts_import_is_there() -> None:
    """Scripts run seldom, and nothing else tells that a name of theirs has moved."""
    missing = [
        f"{path}: {node.module}.{alias.name}"
        for path in files_of("scripts")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES
        for alias in node.names
        if alias.name not in names_in(node.module)
    ]
    assert missing == []


def names_in(module: str) -> set[str]:
    """Return the names that a module, or a package with what its stub offers, has at its top."""
    path = ROOT.joinpath(*module.split("."))
    homes = [path.with_suffix(".py"), path / "__init__.py", path / "__init__.pyi"]
    names = {each.stem for each in path.glob("*")}
    for statement in [each for home in homes if home.exists() for each in ast.walk(tree_of(home))]:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
            names.add(statement.id)
    return names
