"""The bar of a run: what it says of a slow start, and that it says so to people only."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from gguf_tools import progress
from gguf_tools.ggml_types import F32
from gguf_tools.layout import FileLayout
from gguf_tools.tensors import TensorInfo
from quantize.fill.session import Output
from quantize.plan.decide import Decider
from quantize.plan.plan import Plan
from quantize.plan.tensor_plan import TensorPlan
from quantize.prepare import Preparation
from quantize.progress import ProgressBar
from quantize.roles import Role


@pytest.fixture
def preparation() -> Preparation:
    info = TensorInfo("a", (4, 32), F32)
    plan = TensorPlan(info.name, info.shape, Role.OTHER, info.name, F32, F32, Decider.RULES, "")
    return Preparation(Plan(F32.name, (plan,)), (Output(Path("x.gguf"), FileLayout.of({}, (info,))),), 0)


def slow_start(preparation: Preparation) -> None:
    """Advance a bar only after everything that waits for its first piece has lost its patience."""
    with ProgressBar("quantizing") as bar:
        advance = bar.start(preparation)
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
        advance(10)


def test_a_slow_first_chunk_is_explained(
    preparation: Preparation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    slow_start(preparation)
    assert capsys.readouterr().err.count("compiling kernels") == 1


def test_a_slow_first_chunk_leaves_a_log_alone(
    preparation: Preparation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0)
    slow_start(preparation)
    assert capsys.readouterr().err == ""


def test_a_quick_run_explains_nothing(
    preparation: Preparation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressBar("quantizing") as bar:
        bar.start(preparation)(preparation.plan.total_bytes)
    shown = capsys.readouterr().err
    assert "quantizing: 100%" in shown
    assert "compiling kernels" not in shown


def test_a_quick_run_says_nothing(preparation: Preparation, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("quantizing") as bar:
        bar.start(preparation)(10)
    assert capsys.readouterr().err == ""
