"""The option of docs/add-an-option.md: the page's changes, made in a copy of the library, and run there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import gguf_tools
from tests.contract.import_graph import ROOT

PAGE = ROOT / "docs" / "add-an-option.md"
MODEL = ROOT / "examples" / "tiny-deepseek-v3"
PLACES = 2
"""Files of the library that a new option touches."""


def changes() -> dict[Path, list[str]]:
    """Return the page's diffs, by the file that was named last before each."""
    found, path = defaultdict(list), Path()
    for name, diff in re.findall(r"`([\w/]+\.py)`|^```diff\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
        if name:
            path = Path(name)
        else:
            found[path].append(diff)
    return found


def changed(text: str, diff: str) -> str:
    """Return a file's text with what a diff adds to the lines that it shows."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] == " ")
    assert text.count(before) == 1, f"not once in the file:\n{before}"
    return text.replace(before, "".join(line[1:] for line in lines))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the library in it, of links but for the files that the page changes."""
    folder = tmp_path_factory.mktemp("library")
    for path, diffs in changes().items():
        for parent in reversed(path.parents[:-1]):
            (folder / parent).mkdir(exist_ok=True)
            for original in (ROOT / parent).iterdir():
                if not (folder / parent / original.name).exists():
                    (folder / parent / original.name).symlink_to(original)
        text = (ROOT / path).read_text(encoding="utf-8")
        for diff in diffs:
            text = changed(text, diff)
        (folder / path).unlink()
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def test_the_page_names_as_many_places_as_there_are() -> None:
    assert len(changes()) == PLACES


SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:3]
model, one, two, three, four = sys.argv[3:]
from gguf_tools.commands.main import main, parsers
import gguf_tools

made = parsers()
for command in ("convert", "quantize"):
    assert "general.description of the file" in made[f"gguf-tools {command}"].format_help()
assert main(["convert", model, "--outfile", one, "--outtype", "BF16", "--remark", "one"]) == 0
assert main(["quantize", one, two, "COPY", "--remark", "two"]) == 0
gguf_tools.convert(model, three, "BF16", remark="three")
gguf_tools.quantize(one, four, "COPY", remark="four")
"""


def test_both_commands_and_both_functions_have_it(library: Path, tmp_path: Path) -> None:
    """In a process of its own, which finds the changed library first."""
    outputs = [tmp_path / f"{name}.gguf" for name in ("one", "two", "three", "four")]
    words = [sys.executable, "-c", SCRIPT, *map(str, (library, ROOT, MODEL, *outputs))]
    subprocess.run(words, cwd=library, check=True, capture_output=True)
    remarks = [gguf_tools.GGUFFile(output).metadata["general.description"].data for output in outputs]
    assert remarks == ["one", "two", "three", "four"]
