"""What a public function asks for, and what it returns, can be imported from where the function is.

That goes for classes: who calls a function makes a value of one. What another name stands for, such as a few
texts, is written as it is. Options are made by callers, so their fields count, too; a plan comes from a
function.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, is_typeddict

import pytest

from tests.contract.import_graph import PACKAGES

MADE_BY_CALLERS = {
    "AuditOptions",
    "CollectOptions", "ConvertOptions", "Cut", "EvaluateOptions", "ForwardOptions", "PlanOptions",
    "QuantizeOptions", "RunOptions", "SensitivityOptions",
}  # fmt: skip
"""Classes of options; what they are made of has to be known to a caller, too."""


def named(annotation: ast.expr | None) -> Iterator[str]:
    """Yield the names in an annotation, which may be a text."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    for node in ast.walk(annotation) if annotation is not None else ():
        if isinstance(node, ast.Name):
            yield node.id


def tree_of(value: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def parameters(function: ast.FunctionDef) -> Iterator[str]:
    arguments = function.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.kwarg):
        if each is not None:
            yield from named(each.annotation)


def asked_for(class_: type) -> Iterator[str]:
    """Yield the names of what a class is made of: its fields and those of its bases, or those of __init__."""
    for base in getattr(class_, "__orig_bases__", ()) if is_typeddict(class_) else class_.__mro__:
        if getattr(base, "__module__", "builtins").split(".")[0] not in PACKAGES:
            continue
        for node in tree_of(base).body:
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
                yield from named(node.annotation)
            elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
                yield from parameters(node)
    if is_typeddict(class_):
        yield from (name for node in tree_of(class_).body if isinstance(node, ast.AnnAssign)
                    for name in named(node.annotation))  # fmt: skip


def home_of(name: str, module: ModuleType) -> str:
    """Return the module that defines a name which is used in `module`; "" for what isn't this project's."""
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and name in {each.asname or each.name for each in node.names}:
            is_ours = node.module is not None and node.module.split(".")[0] in PACKAGES
            return str(node.module) if is_ours else ""
    own = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
           if isinstance(target, ast.Name)}  # fmt: skip
    own |= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return module.__name__ if name in own and not name.startswith("_") else ""


def not_exported(package: ModuleType, function: Any) -> set[str]:
    """Return the classes in a function's signature, and in its options, that the package does not have."""
    tree, module = tree_of(function), inspect.getmodule(function)
    known = {*package.__all__, *importlib.import_module("gguf_tools").__all__}
    classes = dict(classes_of(named(tree.returns), module))
    wanted = list(classes_of(parameters(tree), module))
    while wanted:
        name, class_ = wanted.pop()
        if name in classes:
            continue
        classes[name] = class_
        if is_typeddict(class_) or name in MADE_BY_CALLERS:
            wanted += classes_of(asked_for(class_), importlib.import_module(class_.__module__))
    return {name for name, class_ in classes.items() if not is_typeddict(class_)} - known


def classes_of(names: Iterable[str], module: ModuleType) -> Iterator[tuple[str, type]]:
    for name in names:
        home = home_of(name, module)
        value = getattr(importlib.import_module(home), name) if home else None
        if isinstance(value, type):
            yield name, value


@pytest.mark.parametrize("package", PACKAGES)
def test_what_signatures_name_is_exported(package: str) -> None:
    module = importlib.import_module(package)
    functions = {name: getattr(module, name) for name in module.__all__}
    missing = {
        name: sorted(not_exported(module, function))
        for name, function in functions.items()
        if inspect.isfunction(function)
    }
    assert {name: names for name, names in missing.items() if names} == {}
