"""docs/first-ten-minutes.md says what the commands print today."""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest

from scripts.record.first_ten_minutes import HEAD, PAGE, STEPS, record


def without_measures(page: str) -> list[str]:
    """Return the words of each line, without what differs between machines: times, speeds and measures."""
    page = re.sub(r" s, [\d.]+ s of them for compiling kernels, once", " s", page)
    # The worst tensors may be near to each other.
    page = re.sub(r"(?m)^ +blk\.\S+ \w+ \([\d.]+\)$", "a tensor", page)
    page = re.sub(r"\b[KMG]iB a second", "MiB a second", page)
    return [" ".join(re.sub(r"-?\d+\.\d+", "#", line).split()) for line in page.splitlines()]


def test_every_command_is_shown() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.startswith(HEAD)
    assert [command for _, command, _ in STEPS if f"    $ {command}\n" not in page] == []


def test_torch_is_installed_before_it_is_needed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.index("pip install torch --index-url") < page.index("$ imatrix ")


def test_outputs_do_not_lie_untracked_in_the_clone() -> None:
    """What the commands write in the root of a clone, and the partials of it, are ignored."""
    lines = (PAGE.parents[1] / ".gitignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.removeprefix("/") for line in lines if line.startswith("/")]
    outputs = [word for _, command, _ in STEPS for word in shlex.split(command) if word.startswith("tiny")]
    assert len(outputs) > 5
    for name in (*outputs, *(f"{output}.partial" for output in outputs), "ggml-model-Q4_K_M.gguf"):
        assert any(fnmatch(name, pattern) for pattern in patterns), name


@pytest.mark.slow
def test_the_page_is_current(tmp_path: Path) -> None:
    assert without_measures(record(tmp_path)) == without_measures(PAGE.read_text(encoding="utf-8"))
