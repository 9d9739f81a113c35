"""The bars of a run: of the kernels that it compiles first, and of the bytes that it writes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gguf_tools.format.ggml_types import F32
from gguf_tools.format.layout import FileLayout
from gguf_tools.format.tensors import TensorInfo
from quantize import run_options
from quantize.fill.job import Output
from quantize.plan.decide import Decider, TensorPlan
from quantize.plan.plan import Plan
from quantize.prepare import Preparation
from quantize.roles import Role
from quantize.run_options import ProgressBar, RunOptions


@pytest.fixture
def preparation() -> Preparation:
    info = TensorInfo("a", (4, 32), F32)
    plan = TensorPlan(info.name, info.shape, Role.OTHER, info.name, F32, F32, Decider.RULES, "")
    return Preparation(Plan(F32.name, (plan,)), (Output(Path("x.gguf"), FileLayout.of({}, (info,))),), 0)


def compile_and_fill(preparation: Preparation) -> None:
    with ProgressBar("quantizing") as bar:
        advance = bar.start(preparation)
        compiled = bar.compiling(6)
        for _ in range(6):
            compiled(1)
        advance(preparation.plan.total_bytes)


def test_compiling_has_a_bar_of_its_own(
    preparation: Preparation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_options, "KERNELS", replace(run_options.KERNELS, delay=0))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    compile_and_fill(preparation)
    kernels, _, bytes_ = capsys.readouterr().err.partition("quantizing")
    assert "compiling 6 kernels, once: 100%" in kernels
    assert "| 6/6 [" in kernels
    assert ": 100%" in bytes_


def test_compiling_leaves_a_log_alone(preparation: Preparation, capsys: pytest.CaptureFixture[str]) -> None:
    compile_and_fill(preparation)
    assert capsys.readouterr().err == ""


def test_kernels_from_the_cache_are_not_mentioned(
    preparation: Preparation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressBar("quantizing") as bar:
        advance = bar.start(preparation)
        bar.compiling(6)(6)
        advance(preparation.plan.total_bytes)
    shown = capsys.readouterr().err
    assert "quantizing: 100%" in shown
    assert "compiling" not in shown


def test_a_quick_run_says_nothing(preparation: Preparation, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("quantizing") as bar:
        bar.start(preparation)(10)
    assert capsys.readouterr().err == ""


def test_gradients_have_a_bar_of_their_own(
    preparation: Preparation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressBar("quantizing") as bar:
        run = bar.shows(RunOptions(n_threads=3))
        advance = run.gradients(15, 5)
        for _ in range(20):
            advance(0.5)
    assert run.n_threads == 3
    assert "gradients of the text's predictions: 100%" in capsys.readouterr().err
