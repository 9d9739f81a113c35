"""Finds what stands in the way of this project's packages: a user's own convert.py, in a folder of scripts.

Python looks into the current folder, or that of the script, before it looks at what is installed. There a
`convert.py` is the module `convert`, and "'convert' is not a package" is all that Python says of it.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

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
    from gguf_tools.terminal import say_aside

    hidden = in_the_way()
    if hidden is not None:
        say_aside(f"{prog}: error: {hidden}")
        raise SystemExit(1)
