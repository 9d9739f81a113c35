"""A user's own module that hides a package of ours is named, with what to do about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("hiding", "code"),
    [
        ("convert.py", ["-m", "quantize", "--help"]),
        ("quantize.py", ["-m", "gguf_tools", "--help"]),
        ("imatrix.py", ["-c", "import gguf_tools; gguf_tools.evaluate"]),
        ("convert.py", ["-c", "import quantize, gguf_tools; gguf_tools.quantize('a', 'b', 'Q4_0')"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_hides_what(hiding: str, code: list[str], tmp_path: Path) -> None:
    (tmp_path / hiding).write_text("def convert(): pass\n")
    done = subprocess.run([sys.executable, *code], cwd=tmp_path, capture_output=True, text=True)
    name = hiding.removesuffix(".py")
    last = done.stderr.splitlines()[-1]
    assert f"{tmp_path / hiding}: hides the package {name} of gguf-tools" in last
    assert "give the file another name" in last
    assert done.returncode == 1


def test_names_that_need_nothing_hidden_are_there(tmp_path: Path) -> None:
    (tmp_path / "convert.py").write_text("raise SystemExit('was run')\n")
    code = "import gguf_tools; gguf_tools.open_gguf, gguf_tools.read_values"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
