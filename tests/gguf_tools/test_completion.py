"""Completion scripts: what the shells themselves make of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gguf_tools.cli import main

COMMANDS = ("gguf-tools", "convert-hf-to-gguf", "imatrix", "evaluate", "quantize")


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_all_commands_are_there(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert [name for name in COMMANDS if name not in text] == []
    assert "-ngl" not in text  # flags of other programs


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("quantize --allow", {"--allow-requantize"}),
        ("gguf-tools sp", {"split"}),
        ("gguf-tools show --f", {"--full"}),
        ("gguf-tools mla-layout a b --to bo", {"both"}),
        ("imatrix --output-fo", {"--output-format"}),
        ("convert-hf-to-gguf --split-max-s", {"--split-max-size"}),
    ],
)
def test_bash_completes(
    line: str, expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    (tmp_path / "script").write_text(script("bash", capsys))
    words = line.split()
    name = "_" + words[0].replace("-", "_")
    place = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}"
    code = f"source ./script; {place}; {name}; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == expected
    assert done.stderr == ""
