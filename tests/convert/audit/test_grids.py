"""Bases whose weights lie on a grid: no alarm on clean files of them, and faults that are still found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
import gguf_tools
import quantize
from gguf_tools.commands.main import main
from gguf_tools.findings import Level
from gguf_tools.format.values import Value
from quantize.options import METHOD_KEY
from quantize.plan.plan import PlanOptions
from tests.convert.audit.faults import FAULTS, Fault, Model, damage
from tests.convert.audit.grids import GRIDS, encoded_as, on_grid
from tests.convert.audit.test_clean import alarms
from tests.imatrix.evaluate.trained_files import importances_of

QUICK = {
    ("fp8", "imatrix Q4_K_M"), ("mxfp4", "MXFP4_MOE"), ("awq", "imatrix Q4_0"), ("gptq", "Q4_K_M"),
    ("Q4_K", "imatrix Q4_K_M"),
}  # fmt: skip
TYPES = (
    "Q8_0", "Q4_K_M", "MXFP4_MOE", "imatrix Q4_0", "imatrix Q4_K_M", "imatrix IQ2_XS", "calibrated Q3_K_M",
)  # fmt: skip
"""How files are made of a base; scripts/measure/audit_grids.py tries more."""


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the first two layers of a small model, as F32."""
    folder = tmp_path_factory.mktemp("exact")
    whole, first = folder / "whole.gguf", folder / "f32.gguf"
    convert.convert(Path(__file__).parents[3] / "examples" / "small-llama", whole, outtype="f32")
    quantize.quantize(whole, first, "F32", types=PlanOptions(prune_layers=(2, 3, 4, 5)))
    return first


def grid_file(exact: Path, name: str, how: str, folder: Path, text: Path) -> tuple[Path, Path]:
    """Return a base on a grid, and a file of it."""
    grid = GRIDS.get(name) or encoded_as(name)
    base, file = on_grid(exact, folder / "base.gguf", grid), folder / "file.gguf"
    kind, _, file_type = how.rpartition(" ")
    if kind == "calibrated":
        words = [str(base), str(file), file_type, "--calibrate", str(text), "-c", "64", "--chunks", "4", "-q"]
        assert main(["quantize", *words]) == 0
    else:
        quantize.quantize(base, file, file_type, importances=importances_of(exact) if kind else None)
    return base, file


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=() if (name, how) in QUICK else pytest.mark.slow)
        for name in (*GRIDS, "Q4_K", "Q8_0")
        for how in TYPES
    ],
)
def test_a_base_on_a_grid_raises_no_alarm(
    name: str, how: str, exact: Path, calibration: Path, tmp_path: Path
) -> None:
    base, file = grid_file(exact, name, how, tmp_path, calibration)
    assert alarms(gguf_tools.audit(file, base)) == []


@pytest.mark.parametrize("fault", ["gate and up swapped", "garbage", "zeros behind", "sign turned"])
def test_faults_of_a_file_of_such_a_base_are_found(
    fault: str, exact: Path, calibration: Path, tmp_path: Path
) -> None:
    base, file = grid_file(exact, "Q4_K", "Q4_K_M", tmp_path, calibration)
    damage(file, base, tmp_path / "broken.gguf", FAULTS[fault])
    found = {each.kind for each in gguf_tools.audit(tmp_path / "broken.gguf", base).findings if each.is_bad}
    assert found & set(FAULTS[fault].kinds)


def test_a_file_by_way_of_16_bits_is_not_called_bad(exact: Path, tmp_path: Path) -> None:
    """A converter writes BF16 of a packed folder, and F16 may be made of that."""
    base = on_grid(exact, tmp_path / "base.gguf", GRIDS["fp8"])
    quantize.quantize(base, tmp_path / "bf16.gguf", "BF16")
    quantize.quantize(tmp_path / "bf16.gguf", tmp_path / "file.gguf", "F16")
    report = gguf_tools.audit(tmp_path / "file.gguf", base)
    assert not report.is_wrong
    assert {each.kind for each in report.at(Level.WARNING)} == {"rounded"}


def test_errors_below_those_of_the_type_are_no_damage(exact: Path, calibration: Path, tmp_path: Path) -> None:
    """The plain encoder gives such a base back as it is; whoever calibrates moves some weights a little."""

    def move(model: Model) -> None:
        rng = np.random.default_rng(0)
        for name in model.names[: len(model.names) : 2]:
            if model.file.tensor(name).type.is_quantized:
                values = model.values(name)
                rows = rng.random(len(values)) < 0.1
                noise = rng.normal(0, 0.05 * values.std(), values.shape)
                model.encode(name, values + rows[:, None] * noise)
        model.patch.metadata[METHOD_KEY] = Value.string("two-sided, layer after layer")

    base, file = grid_file(exact, "Q4_K", "Q4_K_M", tmp_path, calibration)
    moved = tmp_path / "moved.gguf"
    damage(file, base, moved, Fault((), move))
    assert moved.read_bytes()[-1000000:] != file.read_bytes()[-1000000:]
    report = gguf_tools.audit(moved, base)
    assert alarms(report) == []
    assert report.encoder == "calibrated", "the file says so"
