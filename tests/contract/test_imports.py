"""Imports point one way: gguf_tools <- quantize <- convert <- imatrix; cli.py files may import anything."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORDER = ["gguf_tools", "quantize", "convert", "imatrix"]
MODULES = sorted(path for package in ORDER for path in (ROOT / package).rglob("*.py"))
COMMANDS = ["gguf_tools.cli", "quantize.cli", "convert.cli", "imatrix.cli"]
HEAVY = ["numba", "torch", "transformers", "llvmlite"]


def imported_packages(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import on line {node.lineno}"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    if path.name == "cli.py":
        return
    package = path.relative_to(ROOT).parts[0]
    above = set(ORDER[ORDER.index(package) + 1 :])
    assert not imported_packages(path) & above


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_packages_never_import_tests_or_test_dependencies(path: Path) -> None:
    foreign = {"tests", "scripts", "pytest", "hypothesis", "xllamacpp", "gguf", "transformers"}
    assert not imported_packages(path) & foreign


@pytest.mark.parametrize("module", COMMANDS)
def test_importing_a_command_loads_nothing_heavy(module: str) -> None:
    probe = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    command = [sys.executable, "-c", probe]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
