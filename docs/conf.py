"""The site: `pip install '.[docs]'`, then `sphinx-build -W docs site`.

The pages are the Markdown files of this folder, which read as well on GitHub; index.md has their order. The
reference is written into reference/ at every build: a page for each package that has a stub, with its names.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import GenericAlias
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.logging import getLogger

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

project = "gguf-tools"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3
default_role = "code"
highlight_language = "text"
html_theme = "furo"
html_title = "gguf-tools"
html_copy_source = False
html_show_copyright = False

PAGE = """\
# {package}

```{{eval-rst}}
.. automodule:: {package}

{own}
```
"""


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", _write_reference)
    app.connect("autodoc-process-docstring", _lay_out)
    app.connect("autodoc-process-signature", _shorten)
    app.connect("env-check-consistency", _check_reference)


def _homes() -> Mapping[str, Mapping[str, str]]:
    """Find the public names of every package, and the package whose page describes each.

    Several packages export the same object, such as RunOptions. `gguf_tools`, from which pipelines import,
    describes all that it has; the rest is described where it is defined, or in the first package by name.
    """
    names = [".".join(path.relative_to(ROOT).parts[:-1]) for path in sorted(ROOT.glob("*/**/__init__.pyi"))]
    packages = {name: importlib.import_module(name) for name in names}
    exporters: dict[tuple[str, int], list[str]] = {}
    for package, module in packages.items():
        for name in module.__all__:
            if inspect.ismodule(getattr(module, name)):
                continue  # which has a page of its own
            exporters.setdefault((name, id(getattr(module, name))), []).append(package)
    homes: dict[str, dict[str, str]] = {package: {} for package in packages}
    for (name, _), those in exporters.items():
        origin = getattr(getattr(packages[those[0]], name), "__module__", "").partition(".")[0]
        for package in those:
            if not name.startswith("__"):
                others = origin if origin in those else those[0]
                homes[package][name] = "gguf_tools" if "gguf_tools" in those else others
    return homes


def _write_reference(app: Sphinx) -> None:
    folder = ROOT / "docs" / "reference"
    folder.mkdir(exist_ok=True)
    homes = _homes()
    for path in folder.glob("*.md"):
        if path.stem not in homes:
            path.unlink()
    for package, home_of in homes.items():
        own = "\n".join(_directive(package, name) for name, home in home_of.items() if home == package)
        others = sorted(f"{{py:obj}}`{home}.{name}`" for name, home in home_of.items() if home != package)
        text = PAGE.format(package=package, own=own)
        if others:
            text += f"\nUnder the same names, `{package}` has {', '.join(others)}.\n"
        path = folder / f"{package}.md"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _directive(package: str, name: str) -> str:
    value = getattr(sys.modules[package], name)
    if inspect.isclass(value) and not isinstance(value, GenericAlias):
        kind = "exception" if issubclass(value, BaseException) else "class"
        return f".. auto{kind}:: {package}.{name}\n   :members:"
    kind = "function" if inspect.isfunction(value) else "data"
    return f".. auto{kind}:: {package}.{name}"


def _check_reference(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names that no page describes; -W makes an error of it."""
    described = env.domains.python_domain.objects
    for package, home_of in _homes().items():
        for name, home in home_of.items():
            if f"{home}.{name}" not in described:
                getLogger(__name__).warning("%s.%s is public, and not in the reference", package, name)


def _lay_out(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Turn a docstring, which is plain text, into reStructuredText.

    A line of a name, two spaces or more, and a meaning becomes a definition, and an indented line code.
    """
    if what == "module":  # whose docstring has no margin: Sphinx takes that of an example for one
        lines[:] = (value.__doc__ or "").splitlines()
    lines[:] = _blocks(lines)


def _blocks(lines: list[str]) -> Iterator[str]:
    row = re.compile(r"(?!>>> |\.\.\. )(\S(?:.*?\S)??) {2,}(\S.*)")
    block = ""
    for line in lines:
        if line.startswith((">>> ", "... ")) or (block == "doctest" and line):
            block = "doctest"
            yield line
        elif found := row.fullmatch(line):
            yield from ([] if block == "rows" else [""])
            block = "rows"
            yield from (f"``{found[1]}``", f"    {_escaped(found[2])}")
        elif line.startswith("    ") and block == "rows":
            yield f"    {_escaped(line.strip())}"
        elif line.startswith("    "):
            yield from ([] if block == "code" else ["::", ""])
            block = "code"
            yield line
        else:
            if line or block == "doctest":
                yield from ([""] if block else [])
                block = ""
            yield _escaped(line)


def _escaped(text: str) -> str:
    """Escape what reStructuredText takes for markup, except for `code`."""
    return re.sub(r"([*|\\]|_(?=\W|$))", r"\\\1", text)


def _shorten(*args: Any) -> tuple[str | None, str | None]:
    """Write a default that a factory makes as `...`, so that signatures parse and types are linked."""
    signature, returns = args[-2:]
    return signature and signature.replace("<factory>", "..."), returns
