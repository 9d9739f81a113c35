"""The bar of a calibrated run: what it takes for work, and how it moves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("torch")

import gguf_tools
from convert.sources import SourceOptions, plan_source
from gguf_tools.progress import WORK, Bar, ProgressState
from imatrix.calibrate import probe
from imatrix.calibrate.estimate import time_text
from imatrix.calibrate.plan import CalibrationPlan
from imatrix.calibrate.probe import LayerTimes, Probe, Speeds
from imatrix.calibrate.work import Meter, Work, work_of
from imatrix.texts.quality import judge
from imatrix.texts.tokens import Cut, Text
from tests.support.trained_model import EXAMPLE

WORK_OF_RUN = Work(others=2.0, gradients=10.0, embeddings=1.0, layers=(8.0, 8.0), end=3.0)


def metered() -> tuple[Meter, list[ProgressState]]:
    states: list[ProgressState] = []
    return Meter(WORK_OF_RUN, Bar("calibrating", WORK, states.append)), states


def test_all_phases_move_one_bar() -> None:
    meter, states = metered()
    meter.start(20, 4)
    assert states[0].done == pytest.approx(2 + 4 * 0.5)
    meter.advance(16)
    assert states[-1].done == pytest.approx(12)
    with meter.embeddings():
        meter.computed(0.25)
        assert states[-1].done == pytest.approx(12.25)
    for layer in (0, 1):
        with meter.layer(layer):
            assert states[-1].done == pytest.approx(13 + 8 * layer)
            assert states[-1].remark == f"layer {layer + 1} of 2"
    with meter.end():
        pass
    assert states[-1].done == pytest.approx(WORK_OF_RUN.seconds) == pytest.approx(32)


def test_layers_teach_how_long_layers_take() -> None:
    meter, states = metered()
    with meter.layer(0):
        for _ in range(16):
            meter.computed(1.0)
        assert states[-1].done == pytest.approx(21), "as far as the layer goes, and no further"
    with meter.layer(1):
        meter.computed(8.0)
        assert states[-1].done == pytest.approx(25), "half of it: the first took twice as long"


def test_a_run_that_is_taken_up_again_begins_at_its_layer() -> None:
    meter, states = metered()
    with meter.layer(1):
        assert states[0].done == pytest.approx(21)


def test_work_that_nobody_expected_moves_nothing() -> None:
    meter = Meter(Work(0, 0, 0, (0.0,), 0), Bar("nothing", WORK, show=None))
    with meter.layer(0):
        meter.computed(1.0)
    with meter.end():
        meter.computed(1.0)


class FixedProbe(Probe):
    """A machine whose speeds are known."""

    @property
    def speeds(self) -> Speeds:  # type: ignore[override]
        return Speeds(product=1e-11, factor=1e-10, move=1e-11, logit=1e-9, rounding=1.0)

    def layer(self, number: int) -> LayerTimes:
        stages = {(f"blk.{number}.attn_q_a.weight",): 0.01}
        return LayerTimes(stages, attention=0.02, block=0.01, expert=1e-6)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> CalibrationPlan:
    calibration = gguf_tools.Calibration(EXAMPLE / "calibration.txt", Cut(64, n_chunks=8))
    output = tmp_path_factory.mktemp("plan") / "out.gguf"
    with plan_source(EXAMPLE, output, "Q4_0", SourceOptions(calibration=calibration)) as run:
        done = run.preparation
        return calibration.begin().plan_run(done.plan, done.outputs, judge)


def fixed(plan: CalibrationPlan, **changes: object) -> Work:
    options = dataclasses.replace(plan.options, **changes)  # type: ignore[arg-type]
    return work_of(options, FixedProbe(plan.shapes, 64, options.forward, options.rounding), plan.text)


def test_work_grows_with_what_is_asked(plan: CalibrationPlan) -> None:
    whole = fixed(plan)
    assert len(whole.layers) == plan.network.n_layers
    assert min(whole.gradients, whole.end, *whole.layers) > 0
    assert sum(fixed(plan, sequential=False).layers) < sum(whole.layers)
    assert fixed(plan, method="one-sided", embedding=False).gradients == 0
    half = dataclasses.replace(plan, text=Text(plan.text.tokens[:4], plan.text.inputs[:4]))
    assert sum(fixed(half).layers) < sum(whole.layers)


def test_this_machine_is_measured_once(plan: CalibrationPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Probe(plan.shapes, 64, plan.options.forward, plan.options.rounding)
    first = work_of(plan.options, measured, plan.text)
    assert 0 < first.seconds < 3600

    def timed(*_: object, **__: object) -> float:
        raise AssertionError("it was measured before")

    monkeypatch.setattr(probe.Probe, "_seconds", timed)
    assert work_of(plan.options, measured, plan.text) == first


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 second"), (40, "40 seconds"), (90, "1.5 minutes"), (5400, "1.5 hours"), (2e5, "2.3 days")],
)
def test_times_for_people(seconds: float, text: str, tmp_path: Path) -> None:
    assert time_text(seconds) == text
