"""Completion scripts: what the shells themselves make of them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gguf_tools.commands.main import main

COMMANDS = ("gguf-tools", "convert-hf-to-gguf", "imatrix", "evaluate", "sensitivity", "quantize")


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_all_commands_are_there(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert [name for name in COMMANDS if name not in text] == []
    assert "-ngl" not in text  # flags of other programs


LINES = [
    ("quantize --allow", {"--allow-requantize"}),
    ("gguf-tools sp", {"split"}),
    ("gguf-tools show --f", {"--full"}),
    ("gguf-tools mla-layout a b --to bo", {"both"}),
    ("imatrix --output-fo", {"--output-format"}),
    ("convert-hf-to-gguf --split-max-s", {"--split-max-size"}),
    ("gguf-tools mla-layout a b --to ''", {"split", "both", "none"}),
    ("gguf-tools repack a b --to ''", set()),
    ("gguf-tools completion ''", {"bash", "zsh", "fish", "-h", "--help", "--verbose"}),
    ("quantize in.gguf out.gguf Q4_K", {"Q4_K", "Q4_K_M", "Q4_K_S", "Q4_K_R4"}),
    ("quantize --imatrix Q", set()),
    ("quantize lint --js", {"--json"}),
    ("quantize --mla ''", {"split", "both", "none"}),
    ("convert-hf-to-gguf --outtype bf", {"bf16"}),
    ("sensitivity --se", {"--seed"}),
    ("gguf-tools quant", {"quantize"}),
    ("gguf-tools quantize --allow", {"--allow-requantize"}),
    ("gguf-tools imatrix st", {"stats"}),
    ("gguf-tools imatrix stats --pl", {"--plot"}),
]
"""What stands on the line, and the words that it may go on with."""


@pytest.mark.parametrize(("line", "expected"), LINES)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes(
    shell: str, line: str, expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (tmp_path / "script").write_text(script(shell, capsys))
    words = shlex.split(line)
    name = "_" + words[0].replace("-", "_")
    place = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}"
    code = {
        "bash": ["bash", "-c", f"source ./script; {place}; {name}; printf '%s\\n' ${{COMPREPLY[@]}}"],
        "zsh": [
            "zsh", "-f", "-c",
            f"autoload -U compinit; compinit -u -D; source ./script; {place}; compgen -F {name}",
        ],
        "fish": ["fish", "-N", "-c", f"source script; complete -C {shlex.quote(' '.join(words))} | cut -f 1"],
    }  # fmt: skip
    done = subprocess.run(code[shell], cwd=tmp_path, capture_output=True, text=True)
    # zsh compares beginnings later, fish compares them without regard to case, and offers files here
    offered = {word for word in done.stdout.split() if word.startswith(words[-1])} - {"script"}
    if shell == "fish" and not words[-1].startswith("-"):
        offered = {word for word in offered if not word.startswith("-")}
        expected = {word for word in expected if not word.startswith("-")}
    assert offered == expected, done.stderr
    assert done.stderr == ""
