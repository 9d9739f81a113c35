"""Faults that are put into files are found, and called by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

import gguf_tools
from convert.audit.report import AuditReport
from tests.convert.audit.conftest import Base, Make
from tests.convert.audit.families import FAMILIES
from tests.convert.audit.faults import FAULTS, damage

TYPES = ("Q8_0", "Q4_K_M", "imatrix IQ2_XS", "calibrated Q2_K")

QUICK = {
    ("llama", "gate and up swapped"), ("llama", "queries not permuted"), ("llama", "garbage"),
    ("llama", "FP8 without scales"), ("llama", "tokens shifted"), ("llama", "vocabulary"),
    ("deepseek2", "kv_b halves mixed up"), ("deepseek2", "expert repeated"),
    ("deepseek2", "square transposed"), ("deepseek2", "norm plus one twice"),
    ("deepseek2", "another revision"), ("deepseek2", "gating"),
}  # fmt: skip
"""What is tried every time, as Q4_K_M."""


def bad_kinds(report: AuditReport) -> set[str]:
    return {each.kind for each in report.findings if each.is_bad}


@pytest.mark.parametrize(
    ("family", "fault", "how"),
    [
        pytest.param(
            family, fault, how,
            marks=() if (family, fault) in QUICK and how == "Q4_K_M" else pytest.mark.slow,
        )
        for how in TYPES
        for family in FAMILIES
        for fault in FAULTS
    ],
)  # fmt: skip
def test_a_fault_is_named(family: str, fault: str, how: str, base: Base, made: Make, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    try:
        damage(made(family, how), base(family), broken, FAULTS[fault])
    except LookupError as error:
        pytest.skip(f"nothing in this model can have it: {error}")
    report = gguf_tools.audit(broken, base(family))
    assert report.is_wrong
    assert bad_kinds(report) & set(FAULTS[fault].kinds), [each.text for each in report.findings]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_sample_of_rows_shows_it_too(
    family: str, fault: str, base: Base, made: Make, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    try:
        damage(made(family, "imatrix IQ2_XS"), base(family), broken, FAULTS[fault])
    except LookupError as error:
        pytest.skip(f"nothing in this model can have it: {error}")
    assert bad_kinds(gguf_tools.audit(broken, base(family), every_row=False)) & set(FAULTS[fault].kinds)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_as_base_shows_it_too(fault: str, base: Base, made: Make, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    try:
        damage(made("deepseek2", "Q4_K_M"), base("deepseek2"), broken, FAULTS[fault])
    except LookupError as error:
        pytest.skip(f"nothing in this model can have it: {error}")
    assert bad_kinds(gguf_tools.audit(broken, made("deepseek2", "F16"))) & set(FAULTS[fault].kinds)


def test_another_model_is_told(base: Base, made: Make) -> None:
    report = gguf_tools.audit(made("llama", "Q4_K_M"), base("deepseek2"))
    assert any("general.architecture" in each.about for each in report.findings if each.is_bad)
