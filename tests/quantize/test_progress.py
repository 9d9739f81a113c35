"""The bars of a run: of the kernels that it compiles first, and of the bytes that it writes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gguf_tools.format.ggml_types import F32
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.progress import KERNELS, ProgressState
from quantize.fill.filling import Output
from quantize.plan.decide import Decider, TensorPlan
from quantize.plan.plan import Plan
from quantize.prepare import Preparation
from quantize.roles import Role
from quantize.run import RunBar
from quantize.run_options import RunOptions


@pytest.fixture
def preparation() -> Preparation:
    info = TensorInfo("a", (4, 32), F32)
    plan = TensorPlan(info.name, info.shape, Role.OTHER, info.name, F32, F32, Decider.RULES, "")
    return Preparation(Plan(F32.name, (plan,)), (Output(Path("x.gguf"), FileLayout.of({}, (info,))),), 0)


def compile_and_fill(preparation: Preparation, n_kernels: int = 6) -> None:
    with RunBar("quantizing", True, preparation.plan.total_bytes) as bar:
        run = bar.told(RunOptions())
        run.compiling.start(n_kernels, 0)
        for _ in range(n_kernels):
            run.compiling.advance(1)
        bar.written(preparation.plan.total_bytes)


def test_compiling_has_a_bar_of_its_own(
    preparation: Preparation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quantize.run.KERNELS", replace(KERNELS, delay=0))
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
    compile_and_fill(preparation)
    shown = capsys.readouterr().err
    assert "quantizing: 100%" in shown
    assert "compiling" not in shown


def test_a_calibration_has_one_bar_over_all_of_its_work(preparation: Preparation) -> None:
    states: list[ProgressState] = []
    with RunBar("calibrating", states.append, None) as bar:
        run = bar.told(RunOptions(n_threads=3))
        bar.written(10)
        run.calibrating.start(60.0, 15.0)
        run.calibrating.remark("gradients")
        run.calibrating.advance(15.0)
        bar.written(preparation.plan.total_bytes - 10)
    assert run.n_threads == 3
    assert [state.done for state in states] == [15, 15, 30, 60]
    assert {state.unit for state in states} == {"work"}
    assert states[1].remark == "gradients"
