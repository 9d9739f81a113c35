"""What a run says it could not be faster than."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest

import gguf_tools.commands.quantize
from gguf_tools.system import files
from gguf_tools.system.files import Moved
from quantize.fill import outputs
from quantize.fill.outputs import limit_of
from tests.quantize.model_files import write_mixture_model


@pytest.mark.parametrize(
    ("moved", "seconds", "limit"),
    [
        (Moved(15, 1), 10, "the disk"),
        (Moved(15, 14), 10, "the page cache"),
        (Moved(9, 9), 10, None),
        (Moved(1.5, 0), 1, None),
    ],
)
def test_files_are_the_limit_if_they_take_most_of_the_time(
    moved: Moved, seconds: float, limit: str | None
) -> None:
    assert limit_of(moved, seconds, n_threads=2) == limit


def test_calls_on_files_are_counted(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    data = np.ones(1 << 24, np.uint8)
    steps = [files.moved()]
    for call in (lambda: files.write_at(fd, data.data, 0), lambda: files.read_into(fd, data.data, 0)):
        assert call() == data.size
        steps.append(files.moved())
    os.close(fd)
    for before, after in itertools.pairwise(steps):
        spent = after.since(before)
        assert spent.seconds > 0
        assert spent.cpu_seconds > 0


def test_the_summary_says_what_the_limit_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    write_mixture_model(model)
    seen: list[tuple[Moved, float, int]] = []

    def limit(moved: Moved, seconds: float, n_threads: int) -> str:
        seen.append((moved, seconds, n_threads))
        return "the disk"

    monkeypatch.setattr(outputs, "limit_of", limit)
    assert gguf_tools.commands.quantize.main([str(model), str(out), "Q8_0", "2"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(" a second, the limit was the disk)")
    assert gguf_tools.commands.quantize.main(["--json", "--force", str(model), str(out), "Q8_0", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["limit"] == "the disk"
    assert [n_threads for _, _, n_threads in seen] == [2, 2]
    assert all(0 < moved.seconds < seconds * n_threads for moved, seconds, n_threads in seen)
