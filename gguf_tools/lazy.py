"""Public names of a package, imported on first use, so that a command's --help stays instant."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from gguf_tools.shadowing import in_the_way


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package (PEP 562).

    `dir`, `help` and completion find the public names in this way before they are imported, and no others.
    homes   public name -> module that defines it, or that has the name itself
    raises  ImportError naming the file that hides a package of ours, where a name is used
    """

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        hidden = in_the_way()
        if hidden is not None:
            raise ImportError(hidden)
        home = import_module(homes[name])
        return getattr(home, name, home) if homes[name].rpartition(".")[2] == name else getattr(home, name)

    def dir_() -> list[str]:
        hidden = {name for name in vars(sys.modules[package]) if name.startswith("__")}
        return sorted({*homes, *hidden})

    return getattr_, dir_
