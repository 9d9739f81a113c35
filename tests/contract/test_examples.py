"""Every public function has an example, and what examples name is there: functions, attributes, keywords."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import gguf_tools
from gguf_tools.commands.functions import CookChoices
from tests.contract.test_choices import CHOICES
from tests.contract.test_docs import PAGES

KEYWORDS = {each.__name__: set(each.__annotations__) for each in (*CHOICES, CookChoices)}
"""Keyword arguments of functions that take the fields of options, by the name of their TypedDict."""

MODULES = {"imatrix": gguf_tools.imatrix, "edit": gguf_tools.edit}


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions that `import gguf_tools` offers, those of its modules too."""
    for name in gguf_tools.__all__:
        value = getattr(gguf_tools, name)
        if isinstance(value, ModuleType):
            yield from ((f"{name}.{each}", getattr(value, each)) for each in value.__all__
                        if inspect.isfunction(getattr(value, each)))  # fmt: skip
        elif inspect.isfunction(value):
            yield name, value


FUNCTIONS = dict(functions())


def examples(text: str) -> str:
    """Return the code of the examples in a docstring: after >>>, or paragraphs that are indented."""
    prompted = "".join(each.source for each in doctest.DocTestParser().get_examples(text))
    paragraphs = (part for part in re.split(r"\n\s*\n", text) if ">>>" not in part)
    indented = [part for part in paragraphs if all(line.startswith("    ") for line in part.splitlines())]
    return prompted + "\n".join(map(textwrap.dedent, indented))


def wrong_names(code: str) -> list[str]:
    """List what a piece of code names that `gguf_tools` does not have."""
    wrong = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = gguf_tools if node.value.id in ("gguf_tools", "gt") else MODULES.get(node.value.id)
            if owner is not None and not hasattr(owner, node.attr):
                wrong.append(ast.unparse(node))
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).removeprefix("gguf_tools.").removeprefix("gt.")
            value = FUNCTIONS.get(called, getattr(gguf_tools, called, None))
            known = None if value is None else keywords_of(value)
            wrong += [f"{called}({key.arg}=)" for key in node.keywords if known and key.arg not in known]
    return wrong


def keywords_of(value: Callable[..., Any]) -> set[str]:
    """List the keyword arguments of a function or a class."""
    found = set[str]()
    for parameter in inspect.signature(value).parameters.values():
        choices = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        found |= KEYWORDS[choices[1]] if choices else {parameter.name}
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_an_example_that_calls_it(name: str) -> None:
    code = examples(inspect.getdoc(FUNCTIONS[name]) or "")
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)}
    assert name.rpartition(".")[2] in {each.rpartition(".")[2] for each in called}
    assert wrong_names(code) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_what_is_there(page: Any) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    blocks += [examples(each) for each in re.findall(r"```pycon\n(.*?)```", text, re.DOTALL)]
    blocks += re.findall(r"(?:^    (?:import|gguf_tools\.|\w+ = gguf_tools\.).*\n)+", text, re.MULTILINE)
    blocks += re.findall(r"`(gguf_tools\.\w+\([^`]*\))`", text)
    for block in blocks:
        assert wrong_names(textwrap.dedent(block)) == []


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ('gguf_tools.quantise("a", "b", "Q4_0")', ["gguf_tools.quantise"]),
        ('quantize("a", "b", "Q4_0", thread=3)', ["quantize(thread=)"]),
        ('gt.imatrix.collect("a", "b", chunks=3)', ["imatrix.collect(chunks=)"]),
        ('edit.set_value("a")', ["edit.set_value"]),
        ('gguf_tools.evaluate("a", "b", ["c"], n_chunks=3, progress=True)', []),
    ],
)
def test_wrong_names_are_found(code: str, wrong: list[str]) -> None:
    assert wrong_names(code) == wrong
