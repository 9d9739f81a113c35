"""Modules and names imported on first use, so that a command's --help stays instant.

No other module imports by a string. A package's stub, `__init__.pyi`, is the one list of its public names.
All but the package's own are lines like

    from quantize.options import QuantizeOptions as QuantizeOptions
    import imatrix as imatrix
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from gguf_tools.shadowing import PACKAGES, in_the_way


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
