"""The Hub's client is used by what it exports, and named in one place."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub import utils

from gguf_tools.hub import library
from tests.contract.import_graph import PACKAGES, ROOT

IMPORT = re.compile(r"^\s*(?:from|import) huggingface_hub\b", re.MULTILINE)


def test_one_module_imports_the_client() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = [path.relative_to(ROOT) for path in modules if IMPORT.search(path.read_text(encoding="utf-8"))]
    assert found == [Path("gguf_tools/hub/library.py")]


def test_names_are_those_that_the_client_exports() -> None:
    modules = {"constants", "errors"}  # have no underscore, and the client's own pages name them
    exported = {*dir(huggingface_hub), *dir(utils), *modules}
    assert set(library.__all__) <= exported
    assert [name for name in library.__all__ if name.startswith("_")] == []
