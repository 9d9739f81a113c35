"""A calibration in bfloat16: what it saves or costs is told beforehand, and its file says the dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import convert
import gguf_tools
from gguf_tools.commands.quantize import main
from imatrix.calibrate import estimate
from imatrix.calibrate.estimate import Cost
from imatrix.calibrate.plan import CalibrationPlan
from imatrix.calibrate.probe import Probe
from imatrix.forward.options import ForwardOptions
from tests.support.trained_model import calibration_text, trained_model

EMULATED = "--dtype bfloat16 is emulated here: products take 8.0 times as long as in float32"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words of a command, but for its options."""
    place = tmp_path_factory.mktemp("dtype")
    convert.convert(trained_model(place), place / "base.gguf", outtype="f32")
    (place / "text.txt").write_bytes(calibration_text()[-4000:])
    calibrated = ["--calibrate", str(place / "text.txt"), "-c", "32", "--chunks", "2"]
    return [*calibrated, str(place / "base.gguf"), str(place / "out.gguf"), "Q4_0"]


@pytest.mark.parametrize(
    ("gain", "dtype", "told"),
    [
        (3.0, "float32", "          about 30 seconds with --dtype bfloat16; the bytes then differ"),
        (0.125, "float32", None),
        (3.0, "bfloat16", None),
        (0.125, "bfloat16", f"note: {EMULATED}"),
    ],
)
def test_a_dry_run_tells_what_bfloat16_does_on_this_machine(
    gain: float, dtype: str, told: str | None, words: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def seconds(plan: CalibrationPlan, *_: object) -> float:
        return 30.0 if plan.options.forward.dtype == "bfloat16" else 80.0

    monkeypatch.setattr(Probe, "bfloat16_gain", gain)
    monkeypatch.setattr(estimate, "calibration_seconds", seconds)
    monkeypatch.setattr(estimate, "cost_of", lambda plan, *_: Cost(0, seconds(plan)))
    assert main(["--dry-run", "--dtype", dtype, *words]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "bfloat16" in line]
    assert lines == ([] if told is None else [told])


def test_a_run_warns_of_a_processor_that_emulates_bfloat16_and_its_file_says_the_dtype(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Probe, "bfloat16_gain", 0.125)
    only = [
        "--tensor-type",
        "attn_output=q4_0",
        "--tensor-type",
        "weight=f16",
        "--one-sided",
        "--no-embedding",
    ]
    assert main(["--dtype", "bfloat16", *only, *words]) == 0
    warned = [line for line in capfd.readouterr().err.splitlines() if "emulated" in line]
    assert warned == [f"warning: {EMULATED}"]
    with gguf_tools.open_gguf(words[-2]) as file:
        assert file.get("gguf_tools.calibration.method") == (
            "one-sided, layer after layer, in bfloat16, token_embd left out, chunks of 32 tokens"
        )


def test_the_dtype_that_is_the_default_is_not_told() -> None:
    calibration = gguf_tools.Calibration("text")
    assert calibration.label == "two-sided, layer after layer"
    assert replace(calibration, forward=ForwardOptions(dtype="bfloat16")).label.endswith(", in bfloat16")


def test_products_in_both_dtypes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Callable[[], Any]] = []

    def seconds(self: Probe, work: Callable[[], Any]) -> float:
        timed.append(work)
        return 3.0 * len(timed)

    monkeypatch.setattr(Probe, "_seconds", seconds)
    shapes: Any = None
    probe = Probe(shapes, 32, ForwardOptions(device="cpu"))
    assert probe.bfloat16_gain == 0.5
    assert [work().dtype for work in timed] == [torch.float32, torch.bfloat16]
