"""Modules that look as if they were not installed, to the Python that a test or a comparison starts."""

from __future__ import annotations

from pathlib import Path

_HIDING = """import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in NAMES else super().find_spec(name, path, target)

sys.meta_path = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""


def hide_modules(folder: Path, *names: str) -> None:
    """Let a folder hide modules from every Python that has it in PYTHONPATH."""
    (folder / "sitecustomize.py").write_text(f"NAMES = {names!r}\n{_HIDING}")
