"""What a package promises: public names that are there, files in the wheel, none too long to read."""

from __future__ import annotations

import ast
from collections import Counter
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gguf_tools import lazy
from scripts.check.house import what_docstrings
from tests.contract.import_graph import (
    COMMAND_HOMES,
    PACKAGES,
    ROOF,
    ROOT,
    files_of,
    floor_of,
    name_of,
    pyproject,
    tree_of,
)

MODULES = [path for package in PACKAGES for path in files_of(package)]
MAX_LINES = 600
MAX_FILES = 20
"""A folder with more can't be taken in at a glance."""

MAX_FUNCTION_LINES = 65
MAX_PARAMETERS = 8


def test_files_are_short_enough_to_read() -> None:
    others = [path for folder in ("scripts", "tests/support", "tests/contract") for path in files_of(folder)]
    assert {
        str(path): n_lines
        for path in (*MODULES, *others)
        if (n_lines := len((ROOT / path).read_text().splitlines())) > MAX_LINES
    } == {}


def test_folders_hold_few_enough_files_to_find_one() -> None:
    n_files = Counter(str(path.parent) for path in MODULES)
    assert {folder: n for folder, n in n_files.items() if n > MAX_FILES} == {}


def test_functions_are_short_and_take_few_values() -> None:
    too_long, too_many = {}, {}
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                names = [each.arg for each in parameters if each.arg not in ("self", "cls")]
                n_lines = (node.end_lineno or 0) - node.lineno + 1
                if n_lines > MAX_FUNCTION_LINES:
                    too_long[f"{path}: {node.name}"] = n_lines
                if len(names) > MAX_PARAMETERS:
                    too_many[f"{path}: {node.name}"] = len(names)
    assert (too_long, too_many) == ({}, {})


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    assert what_docstrings() == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_class_has_a_name_of_its_own_in_its_package(package: str) -> None:
    homes: dict[str, list[str]] = {}
    for path in files_of(package):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_every_folder_of_modules_is_in_the_wheel() -> None:
    patterns = pyproject()["tool"]["setuptools"]["packages"]["find"]["include"]
    for folder in {path.parent for path in MODULES}:
        assert (ROOT / folder / "__init__.py").is_file(), folder
        assert any(fnmatch(".".join(folder.parts), pattern) for pattern in patterns), folder


def test_packages_are_those_of_one_list() -> None:
    assert sorted(lazy.PACKAGES) == sorted(PACKAGES)
    find = pyproject()["tool"]["setuptools"]["packages"]["find"]
    assert sorted(find["include"]) == sorted(f"{package}*" for package in PACKAGES)


def test_every_package_is_typed_and_checked() -> None:
    assert sorted(pyproject()["tool"]["mypy"]["packages"]) == sorted(PACKAGES)
    assert [package for package in PACKAGES if not (ROOT / package / "py.typed").is_file()] == []


def test_every_command_is_installed() -> None:
    for home in COMMAND_HOMES:
        module, _, name = home.partition(":")
        assert floor_of(module) == ROOF
        assert name in _bound_names(module), home


STUBS = [
    path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("__init__.pyi"))
]
"""Lists of public names: what type checkers see of a package, and what it loads its names by."""


@pytest.mark.parametrize("path", STUBS, ids=str)
def test_a_stub_is_the_list_of_public_names(path: Path) -> None:
    package, stub = name_of(path), tree_of(path)
    names = []
    for node in stub.body[1:]:
        if isinstance(node, ast.AnnAssign):
            names.append(ast.unparse(node.target))
            continue
        assert isinstance(node, ast.ImportFrom | ast.Import)
        [alias] = node.names
        names.append(alias.name)
        assert alias.asname == alias.name, "is not public without"
        if isinstance(node, ast.ImportFrom) and node.module != package:
            assert alias.name in _bound_names(str(node.module))
    assert sorted(names) == import_module(package).__all__


def test_public_names_are_there() -> None:
    for path in MODULES:
        names = _literal(tree_of(path), "__all__")
        if names is not None:
            assert names == sorted(names), path
            assert set(names) <= _bound_names(name_of(path)), path


def _literal(tree: ast.Module, name: str) -> Any:
    """Return the value that a module gives a name, if that is a literal; None if it has no such name."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.literal_eval(node.value)
    return None


def _bound_names(module: str) -> set[str]:
    """Return the names that a module binds at its top level."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = set()
    for node in tree_of(file).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(ast.unparse(target) for target in node.targets)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
    return names
