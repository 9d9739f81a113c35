"""Messages name flags in commands, and arguments in Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gguf_tools as gt
import gguf_tools.commands.main
from gguf_tools.choices import FLAGS, speaking_flags, spoken
from gguf_tools.errors import OutputError, ToolkitError
from gguf_tools.findings import Finding
from tests.contract.import_graph import PACKAGES, ROOF, ROOT, files_of, floor_of, name_of
from tests.gguf_tools.sample_files import write_file

OTHERS = {
    "--depth", "--ink", "--muted", "--grid", "--surface", "--ring", "--panel", "--heat", "--heat-share",
    "--series-", "--shade", "--width", "--share", "--stock", "--calibrated", "--chosen", "--bad",
    "--warning",  # of style sheets
    "--yarn-beta-fast", "--yarn-beta-slow", "--local-dir", "--include",  # of other programs
}  # fmt: skip


def texts() -> Iterator[tuple[str, str]]:
    """Yield every text of the library that is no docstring and not a flag's own, and where it is."""
    for package in PACKAGES:
        for path in (each for each in files_of(package) if floor_of(name_of(each)) != ROOF):
            tree = ast.parse((ROOT / path).read_text())
            said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            said |= {id(each) for call in ast.walk(tree) if is_flag(call) for each in ast.walk(call)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
                    yield f"{path}:{node.lineno}", node.value


def is_flag(node: ast.AST) -> bool:
    """Whether a call gives a field its flag, with the name and the help that a command shows."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "flag"


def test_every_flag_in_a_message_has_a_name_in_python() -> None:
    """One that is not in the table, or a word that says as much in a command line of its own, fails."""
    unknown = []
    for place, text in texts():
        if "gguf_tools/choices.py" in place:
            continue
        left = spoken(text)
        for flag in re.findall(r"(?<![\w./`-])--[a-z][a-z-]+", left):
            is_line = re.search(rf"\b(gguf-tools|quantize|evaluate|imatrix|hf)\b[\w -]* {flag}", left)
            if flag not in OTHERS and not is_line:
                unknown.append((place, flag, text[:60]))
    assert unknown == []


@pytest.mark.parametrize(
    ("said", "in_python"),
    [
        ("x: exists already; --force replaces it", "x: exists already; force=True replaces it"),
        ("begin again with --restart", "begin again with restart=True"),
        ("4 chunks of 512 tokens, and --from-chunk 7", "4 chunks of 512 tokens, and from_chunk=7"),
        ("expected a chunk of 5 or more; see -c", "expected a chunk of 5 or more; see chunk_size"),
        ("made without --calibrate", "made without calibration"),
        ("pass one with --imatrix", "pass one with importances"),
        ("kept without --no-mtp", "kept without mtp=False"),
        ("replace it with gguf-tools card --force", "replace it with gguf-tools card --force"),
        ("not what `evaluate --json` writes", "not what `evaluate --json` writes"),
        ("a/--force/b and x--force", "a/--force/b and x--force"),
        ("tensors of --forceful size", "tensors of --forceful size"),
    ],
)
def test_words(said: str, in_python: str) -> None:
    assert spoken(said) == in_python
    assert Finding("kind", said).text == in_python
    assert str(ToolkitError(said)) == in_python
    with speaking_flags():
        assert spoken(said) == said
        assert Finding("kind", said).text == said
        assert str(ToolkitError(said)) == said


def test_flags_are_not_both() -> None:
    assert all(flag.startswith("-") for flag in FLAGS)


def test_the_same_refusal_from_python_and_from_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, there = tmp_path / "whole.gguf", tmp_path / "part-00001-of-00001.gguf"
    write_file(whole)
    there.write_bytes(b"mine")
    with pytest.raises(OutputError, match=r"exists already; force=True replaces it$"):
        gt.split(whole, tmp_path / "part")
    assert gguf_tools.commands.main.main(["split", str(whole), str(tmp_path / "part")]) == 1
    assert capsys.readouterr().err.endswith("exists already; --force replaces it\n")
    with pytest.raises(OutputError, match=r"force=True"):  # what was said before holds again
        gt.split(whole, tmp_path / "part")
