"""imatrix/forward/device.py alone knows which device is the CPU, and copies between devices and numpy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.import_graph import files_of, tree_of

OWNER = Path("imatrix/forward/device.py")
OTHER_MACHINES = {Path("quantize/size/choose_types.py")}
"""Modules in which "cpu" is where somebody else will run the file."""

COMPUTING = ("imatrix", "quantize/rounding", "quantize/size")

MODULES = sorted({path for folder in COMPUTING for path in files_of(folder)} - {OWNER})


def questions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of what only the owner may say."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("cpu", "cuda", "from_numpy"):
            yield node.lineno, f".{node.attr}"
        if isinstance(node, ast.Constant) and node.value in ("cpu", "cuda"):
            yield node.lineno, repr(node.value)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_only_the_owner_knows_devices(path: Path) -> None:
    if path not in OTHER_MACHINES:
        assert not list(questions(tree_of(path)))


def test_the_owner_would_be_found_out() -> None:
    assert {what for _, what in questions(tree_of(OWNER))} == {
        ".cpu", ".cuda", ".from_numpy", "'cpu'", "'cuda'",
    }  # fmt: skip
