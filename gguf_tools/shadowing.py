"""Finds what stands in the way of this project's packages: a user's own convert.py, in a folder of scripts.

Python looks into the current folder, or that of the script, before it looks at what is installed. There a
`convert.py` is the module `convert`, and "'convert' is not a package" is all that Python says of it.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path

_PACKAGES = ("quantize", "convert", "imatrix")


@cache
def in_the_way() -> str | None:
    """Describe the first module or package that another one of its name hides; None: all can be imported."""
    ours = Path(__file__).resolve().parents[1]
    for name in _PACKAGES:
        found = importlib.util.find_spec(name)
        place = None if found is None or found.origin is None else Path(found.origin).resolve()
        if place is not None and place != ours / name / "__init__.py":
            return (
                f"{place}: hides the package {name} of gguf-tools, which is looked for here first; give the"
                " file another name, or run from another folder"
            )
    return None


def run_command(module: str, prog: str) -> int:
    """Run the `main` of a command's module, for `python -m`; return its exit code.

    prog  the words that its messages begin with
    """
    from gguf_tools.terminal import say_aside

    hidden = in_the_way()
    if hidden is not None:
        say_aside(f"{prog}: error: {hidden}")
        return 1
    code: int = importlib.import_module(module).main()
    return code
