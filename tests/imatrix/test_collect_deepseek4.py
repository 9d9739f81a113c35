"""Importances of DeepSeek V4: any threads, any place for hidden states; what quantizers make of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
import gguf_tools.commands.imatrix
from gguf_tools import open_gguf
from imatrix.store import load
from quantize.importances.entries import resolve
from tests.imatrix.forward.deepseek4_models import v4_model

pytest.importorskip("torch")

OUTPUT_A = "blk.1.attn_output_a.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return v4_model(tmp_path_factory.mktemp("v4") / "model")


def collect(model: Path, text: Path, out: Path, *options: str) -> bytes:
    words = ["-m", str(model), "-f", str(text), "-o", str(out), "-c", "140", "--chunks", "3", *options]
    assert gguf_tools.commands.imatrix.main(words) == 0
    return out.read_bytes()


@pytest.mark.slow
def test_threads_and_where_hidden_states_live_change_nothing(
    folder: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = collect(folder, calibration, tmp_path / "one.gguf", "--threads", "1")
    printed = capsys.readouterr().out
    assert "note: tokens attend to 24 positions, whose choice depends on rounding" in printed
    assert "note: attn_output_a has a row of values for each group of heads" in printed
    assert collect(folder, calibration, tmp_path / "three.gguf", "--threads", "3") == expected
    # No budget for hidden states: they are kept in files.
    assert collect(folder, calibration, tmp_path / "file.gguf", "--threads", "1", "--memory", "0") == expected
    convert.convert(folder, tmp_path / "model.gguf", outtype="f32")
    assert collect(tmp_path / "model.gguf", calibration, tmp_path / "of-file.gguf") == expected


def test_groups_of_rows_are_weighed_by_their_own(folder: Path, calibration: Path, tmp_path: Path) -> None:
    convert.convert(folder, tmp_path / "model.gguf", outtype="f32")
    collect(folder, calibration, tmp_path / "m.gguf", "--threads", "1")
    entry = load(tmp_path / "m.gguf").entries[OUTPUT_A]
    assert entry.shape == (1, 128)
    with open_gguf(tmp_path / "model.gguf") as file:
        tensor = file.tensors[OUTPUT_A]
    resolved = resolve(tensor, {OUTPUT_A: entry})
    assert resolved is not None
    assert resolved.reason == "one row per group of rows"
    assert resolved.rows_per_weights == 32
    np.testing.assert_allclose(resolved.weights(), entry.read().reshape(2, 64) / entry.counts, rtol=1e-6)


def test_llama_quantize_gets_one_row(folder: Path, calibration: Path, tmp_path: Path) -> None:
    collect(folder, calibration, tmp_path / "m.gguf", "--threads", "1")
    collect(folder, calibration, tmp_path / "one-row.gguf", "--threads", "1", "--mla", "both")
    groups, row = (load(tmp_path / name).entries[OUTPUT_A] for name in ("m.gguf", "one-row.gguf"))
    np.testing.assert_allclose(row.read()[0], groups.read().reshape(2, 64).mean(0), rtol=1e-6)
    assert row.counts.tolist() == groups.counts.tolist() == [420]
