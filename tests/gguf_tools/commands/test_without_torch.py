"""Commands that compute a model, where torch is not installed: one line that says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.import_graph import ROOT
from tests.support.hidden_modules import hide_modules


@pytest.mark.parametrize(
    "words",
    [
        "imatrix -m model -f text.txt -o out.gguf",
        "evaluate model model -f text.txt",
        "sensitivity model -f text.txt -o out.json",
        "cook model -f text.txt -o out --types Q4_0",
        "quantize model out.gguf Q4_0 --calibrate text.txt",
    ],
)
def test_one_line_says_what_to_install(words: str, tmp_path: Path) -> None:
    hide_modules(tmp_path, "torch")
    (tmp_path / "text.txt").write_text("A text.")
    (tmp_path / "model").symlink_to(ROOT / "examples" / "tiny-deepseek-v3")
    done = subprocess.run(
        [sys.executable, "-m", "gguf_tools", *words.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "needs torch: pip install 'gguf-tools[torch]'" in line
