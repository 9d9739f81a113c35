"""Functions that become part of kernels."""

from __future__ import annotations

import subprocess
import sys

from quantize.formats import search

NAMED = "from quantize.formats import search; print(search.{}.py_func.__qualname__)"


def test_symbols_of_two_processes_differ() -> None:
    """Else a kernel from the cache could be given a function that another process made in the same way."""
    name = next(name for name, value in vars(search).items() if type(value).__name__ == "InlinedFunction")
    here = getattr(search, name).py_func.__qualname__
    there = subprocess.run(
        [sys.executable, "-c", NAMED.format(name)], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert here.partition(".")[0] == there.partition(".")[0] == name
    assert here != there
