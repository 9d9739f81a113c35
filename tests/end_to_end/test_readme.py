"""The README's first block does what it says, in a copy of nothing but what the repository has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gguf_tools.commands.convert import main as convert
from gguf_tools.commands.main import main as gguf_tools
from gguf_tools.format.shards import open_gguf
from quantize.plan.recipes import RECIPES
from tests.contract.import_graph import ROOT

COMMANDS = {"convert-hf-to-gguf": convert, "gguf-tools": gguf_tools}


def first_block() -> list[list[str]]:
    """Return the commands of the first indented block under `## Start`, as words."""
    start = (ROOT / "README.md").read_text().partition("## Start\n")[2].partition("\n\nOnly")[0]
    return [shlex.split(line) for line in re.findall(r"^    (.+)$", start, re.MULTILINE)]


def test_first_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    install, *commands = first_block()
    assert install == ["pip", "install", "."]
    for program, *arguments in commands:
        assert COMMANDS[program](arguments) == 0
    shown = capsys.readouterr().out
    assert "deepseek2.attention.kv_lora_rank" in shown
    assert "Q6_K" in shown
    with open_gguf("tiny-Q4_K_M.gguf") as file:
        assert file.get("general.file_type") == RECIPES["Q4_K_M"].file_type


def test_sample_is_a_whole_folder() -> None:
    names = {path.name for path in (ROOT / "examples" / "tiny-deepseek-v3").iterdir()}
    assert names == {
        "README.md", "calibration.txt", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
