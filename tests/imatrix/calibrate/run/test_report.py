"""What a calibration tells of its parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from gguf_tools.format.ggml_types import Q4_K
from gguf_tools.format.tensors import TensorInfo
from imatrix.calibrate.estimate import amount_findings
from imatrix.calibrate.options import CalibrationOptions
from imatrix.calibrate.run.output import Record, Records
from imatrix.calibrate.run.report import Report, report_lines
from imatrix.calibrate.statistics.inputs import HoldoutSplit
from imatrix.texts.quality import TextQuality
from imatrix.texts.tokens import Cut, Text

ORDINARY = TextQuality(n_tokens=9000, n_distinct=900, variety=100, n_copied=0, order=2)

PART = Record(
    tensor="blk.1.ffn_down_exps.weight",
    first=0,
    n_rows=8,
    n_cols=256,
    n_seen=400,
    has_factor=True,
    error=1.0,
    stock_error=2.0,
    is_stock=False,
)


def lines(*parts: Record) -> list[str]:
    return list(report_lines(Report(parts, HoldoutSplit.of(8, 64))))


def test_parts_that_keep_stock_bytes_are_counted() -> None:
    worse = replace(PART, first=8, error=3.0, is_stock=True)
    counted, kept = lines(PART, worse)
    assert counted == "calibrated 1 of 2 matrices in 1 tensors"
    assert kept.endswith("keep stock's bytes: blk.1.ffn_down_exps.weight")


def test_parts_that_were_decided_by_chance_are_counted() -> None:
    counted, close = lines(PART, replace(PART, first=8, is_close=True))
    assert counted == "calibrated 2 of 2 matrices in 1 tensors"
    assert close.startswith("  for 1, the text held back shows no clear winner")
    assert close.endswith(": blk.1.ffn_down_exps.weight")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"n_seen": 100}, "little text"),
        ({"n_seen": 0}, "unreached experts"),
        ({"n_seen": 0, "has_factor": False}, "not seen"),
        ({"has_factor": False}, "bad moments"),
    ],
)
def test_what_a_user_should_know_is_found(change: dict[str, int], kind: str) -> None:
    report = Report((PART, replace(PART, first=8, **change)), HoldoutSplit.of(8, 64))
    assert [finding.kind for finding in report.findings()] == [kind]


@pytest.mark.parametrize(("tensor", "told"), [("ffn_down_exps", True), ("ffn_down", False)])
def test_experts_are_spoken_of_where_there_are_some(tensor: str, told: bool) -> None:
    few = replace(PART, tensor=f"blk.1.{tensor}.weight", n_seen=100)
    (found,) = Report((few,), HoldoutSplit.of(8, 64)).findings()
    assert ("experts" in found.text) == told
    assert "a longer text makes a better file" in found.text


@pytest.mark.parametrize(("n_cols", "kinds"), [(256, ["little text"]), (192, [])])
def test_columns_of_padding_need_no_tokens(n_cols: int, kinds: list[str], tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl", "a")
    records.add(replace(PART, n_seen=200))
    records.close()
    report = Report.of({PART.tensor: n_cols}, records, HoldoutSplit.of(8, 64), None, ORDINARY)
    assert [finding.kind for finding in report.findings()] == kinds


@pytest.mark.parametrize(("n_cols", "told"), [(256, "7.8 tokens for each of the 256 columns"), (192, None)])
def test_a_plan_counts_no_padding_either(n_cols: int, told: str | None) -> None:
    info = TensorInfo("blk.0.ffn_down.weight", (256, 256), Q4_K)
    text = Text(np.zeros((4, 500), np.int64), np.zeros((4, 500), np.int64))
    plan: Any = SimpleNamespace(
        made={info.name: info},
        n_cols=lambda info: n_cols,
        text=text,
        options=CalibrationOptions("", Cut(500, 0, 4)),
    )
    found = [finding.text for finding in amount_findings(plan, 1)]
    assert len(found) == (told is not None)
    assert told is None or told in found[0]
    assert not any("third" in each for each in found), "how much better differs from model to model"


def test_one_chunk_is_told() -> None:
    assert [finding.kind for finding in Report((PART,), HoldoutSplit.of(1, 64)).findings()] == ["one chunk"]


def test_records_outlive_a_run_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = Records(path, "a")
    records.add(PART)
    records.add(replace(PART, error=0.5))
    records.add_chunk(7, 2**63)
    records.close()
    with path.open("ab") as file:
        file.write(b'0123456789abcdef {"part": {"tensor"')
    again = Records(path, "a")
    again.add_chunk(8, 1)
    again.close()
    last = Records(path, "a")
    assert last.of([PART.tensor]) == [replace(PART, error=0.5)]
    assert last.of(["output.weight"]) == []
    assert last.chunks == {7: 2**63, 8: 1}
    assert Records(path, "b").chunks == {}
