from __future__ import annotations

import time
from pathlib import Path

import pytest

from gguf_tools.ggml_types import F32
from gguf_tools.layout import FileLayout
from quantize import progress
from quantize.pipeline import Output, Preparation
from quantize.plan.plan import Plan
from quantize.progress import ProgressBar


@pytest.fixture
def preparation() -> Preparation:
    return Preparation(Plan(F32.name, ()), (Output(Path("x.gguf"), FileLayout.of({}, ())),), 0)


def test_a_slow_first_chunk_is_explained(
    preparation: Preparation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.01)
    with ProgressBar("quantizing") as bar:
        advance = bar.start(preparation)
        time.sleep(0.2)
        advance(10)
    assert capsys.readouterr().err.count("compiling kernels") == 1


def test_a_quick_run_says_nothing(preparation: Preparation, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("quantizing") as bar:
        bar.start(preparation)(10)
    assert capsys.readouterr().err == ""
