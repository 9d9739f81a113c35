"""Modules and names imported on first use, so that a command's --help stays instant.

No other module imports by a string. A package's stub, `__init__.pyi`, is the one list of its public names.
All but the package's own are lines like

    from quantize.options import QuantizeOptions as QuantizeOptions
    import imatrix as imatrix

A user's own convert.py, in a folder of scripts, stands in the way of a package: Python looks into the current
folder, or that of the script, before it looks at what is installed. There a `convert.py` is the module
`convert`, and "'convert' is not a package" is all that Python says of it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("gguf_tools", "quantize", "convert", "imatrix")
"""The packages from the ground up: but for the commands, each does without those after it."""


@cache
def in_the_way(last: str = PACKAGES[-1]) -> str | None:
    """Describe the first module or package that another one of its name hides; None: all can be imported.

    last  the last of PACKAGES that is needed
    """
    ours = Path(__file__).resolve().parents[1]
    for name in PACKAGES[: PACKAGES.index(last) + 1]:
        found = importlib.util.find_spec(name)
        place = None if found is None or found.origin is None else Path(found.origin).resolve()
        if place is not None and place != ours / name / "__init__.py":
            return (
                f"{place}: hides the package {name} of gguf-tools, which is looked for here first; give the"
                " file another name, or run from another folder"
            )
    return None


def stop_if_hidden(prog: str) -> None:
    """End Python with exit code 1 and a message if a package can't be imported, for `python -m`.

    prog  the words that the message begins with
    """
    from gguf_tools.text import say_aside

    hidden = in_the_way()
    if hidden is not None:
        say_aside(f"{prog}: error: {hidden}")
        raise SystemExit(1)


def public_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__all__`, the `__getattr__` and the `__dir__` of a package, as its stub has them (PEP 562).

    `dir`, `help` and completion find the public names in this way before they are imported, and no others.
    raises  ImportError naming the file that hides a package of ours, where a name is used that needs it
    """
    module = sys.modules[package]
    homes = _homes(Path(str(module.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        hidden = in_the_way(PACKAGES[-1] if ".commands." in home else home.partition(".")[0])
        if hidden is not None:
            raise ImportError(hidden)
        if home in (name, package):  # a package, and a part of this one
            return import_module(name if home == name else f"{package}.{name}")
        return getattr(import_module(home), name)

    def dir_() -> list[str]:
        return sorted({*homes, *(name for name in vars(module) if name.startswith("__"))})

    return sorted(homes), getattr_, dir_


def late(module: str, package: str | None = None) -> ModuleType:
    """Return the module that a table names, which is none above who asks.

    package  that a name is relative to where it begins with a dot
    """
    return import_module(module, package)


def _homes(stub: str) -> dict[str, str]:
    """Return the names in the text of a stub, each with the module that defines it."""
    homes = {}
    for line in stub.splitlines():
        match line.split():
            case ["from", home, "import", name, "as", _]:
                homes[name] = home
            case ["import", name, "as", _]:
                homes[name] = name
            case [name, _] if name.endswith(":"):
                homes[name.removesuffix(":")] = ""
    return homes
