"""What a notebook sees: names by completion, help, and results on one line."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass

import pytest

import gguf_tools
from tests.contract.import_graph import PACKAGES, ROOT


@pytest.mark.parametrize("package", PACKAGES)
def test_completion_and_help_show_public_names(package: str) -> None:
    code = f"import {package}, sys; print(*dir({package})); print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    names, has_numba = done.stdout.splitlines()
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(names.split())
    assert {name for name in names.split() if not name.startswith("__")} <= set(module.__all__)
    assert {"ToolkitError", "__version__"} <= set(module.__all__)
    assert has_numba == "False"
    shown = pydoc.plain(pydoc.render_doc(module))
    assert [name for name in module.__all__ if not name.startswith("_") and name not in shown] == []


def test_names_are_there_without_torch() -> None:
    """help() looks at all of them, and a plan needs none of what computes."""
    code = f"""
import importlib, pydoc, sys
sys.modules["torch"] = None
for package in {PACKAGES}:
    pydoc.render_doc(importlib.import_module(package))
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_tell_every_field(package: str) -> None:
    module = importlib.import_module(package)
    untold = {}
    for name in module.__all__:
        class_ = getattr(module, name)
        if not isinstance(class_, type) or not is_dataclass(class_):
            continue
        docs = "\n".join(inspect.getdoc(base) or "" for base in class_.__mro__)
        told = {word for row in re.findall(r"(?m)^(\S.*?)  ", docs) for word in re.findall(r"\w+", row)}
        untold[name] = [each.name for each in fields(class_) if not each.name.startswith("_")]
        untold[name] = [each for each in untold[name] if each not in told]
    assert {name: missing for name, missing in untold.items() if missing} == {}


def test_help_begins_with_the_functions() -> None:
    functions = {name for name in gguf_tools.__all__ if inspect.isfunction(getattr(gguf_tools, name))}
    told = re.findall(r"(?m)^    ([a-z_]+)  ", str(gguf_tools.__doc__))
    assert sorted(told) == sorted(functions)


def test_all_errors_are_public() -> None:
    from gguf_tools import errors

    raised = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert raised <= set(gguf_tools.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_python_m_is_the_command(package: str) -> None:
    command = [sys.executable, "-m", package, "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f" {gguf_tools.__version__}\n")


def test_quantize_does_not_load_numba_before_it_encodes() -> None:
    code = "from quantize import QuantizeOptions, quantize; import sys; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
