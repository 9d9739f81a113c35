"""What type checkers see of lanes is what numba sees: the same names, and the same parameters."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import quantize.simd

FOLDER = Path(quantize.simd.__file__).parent
STUBS = sorted(path.stem for path in FOLDER.glob("*.pyi"))
ONLY_FOR_CHECKERS = {"Lanes"}
ONLY_FOR_NUMBA = {"Emit"}


def parameters_by_name(path: Path) -> dict[str, list[str] | None]:
    """Return the public names that a file defines, with the parameters of those that kernels can call."""
    names: dict[str, list[str] | None] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found = [argument.arg for argument in node.args.args]
            names[node.name] = [name for name in found if name != "_context"]
        elif isinstance(node, ast.ClassDef):
            names[node.name] = None
        elif isinstance(node, ast.Assign):
            names.update({target.id: None for target in node.targets if isinstance(target, ast.Name)})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = None
    return {name: found for name, found in names.items() if not name.startswith("_")}


def test_lanes_and_tiles_have_stubs() -> None:
    assert STUBS == ["lane_items", "lane_memory", "lanes", "octets"]


@pytest.mark.parametrize("module", STUBS)
def test_a_stub_has_the_names_and_parameters_of_its_module(module: str) -> None:
    numba_sees = parameters_by_name(FOLDER / f"{module}.py")
    checkers_see = parameters_by_name(FOLDER / f"{module}.pyi")
    assert numba_sees.keys() - ONLY_FOR_NUMBA == checkers_see.keys() - ONLY_FOR_CHECKERS
    for name, parameters in checkers_see.items():
        if parameters is not None:
            assert parameters == numba_sees[name]
