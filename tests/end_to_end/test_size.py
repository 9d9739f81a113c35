"""A size and a text are enough: losses are measured, types chosen, and tensors calibrated as them."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert.options import ConvertOptions
from convert.pipeline import plan_run
from gguf_cli.quantize import main
from gguf_tools import open_gguf
from quantize.plan.sensitivities import (
    Sensitivities,
    TensorSensitivity,
    read_sensitivities,
    write_sensitivities,
)

SAMPLE = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v3"



@pytest.mark.parametrize("layout", ["split", "both", "none"])
def test_losses_of_the_folder_serve_every_layout_of_its_attention(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`sensitivity FOLDER` measures split heads; --for ik_llama.cpp means --mla both."""
    with plan_run(SAMPLE, tmp_path / "split.gguf", ConvertOptions(outtype="Q8_0")) as run:
        infos = [info for info in run.preparation.plan.infos if info.type.is_quantized]
    damage = {"Q4_0": 0.02, "IQ4_NL": 0.015, "Q8_0": 0.001}
    tensors = {info.name: TensorSensitivity(info.shape, damage) for info in infos}
    write_sensitivities(Sensitivities(tensors), tmp_path / "losses.json")
    target = "llama.cpp" if layout == "split" else "ik_llama.cpp"
    words = ["--dry-run", "--size", "5bpw", "--for", target, "--losses", tmp_path / "losses.json"]
    more = [] if layout == "both" else ["--mla", layout]
    assert main([str(word) for word in [*words, *more, SAMPLE, tmp_path / "out.gguf"]]) == 0
    assert "types chosen: " in capsys.readouterr().out


@pytest.mark.slow
def test_types_and_bytes_are_chosen_in_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, text = tmp_path / "out.gguf", SAMPLE / "calibration.txt"
    words = ["--calibrate", text, "-c", 128, "--chunks", 2, "--size", "3.5bpw", SAMPLE, output]
    assert main([str(word) for word in words]) == 0
    printed = capsys.readouterr().out
    assert "types chosen: " in printed
    assert "calibrated " in printed
    losses = read_sensitivities(f"{output}.losses.json")
    assert losses.text["chunks"] == 2
    with open_gguf(output) as file:
        n_bits = 8 * sum(tensor.n_bytes for tensor in file.tensors.values())
        n_weights = sum(tensor.n_elems for tensor in file.tensors.values())
        types = {tensor.type.name for tensor in file.tensors.values()}
    assert 3.45 < n_bits / n_weights <= 3.5
    assert len(types) > 4
    measured = Path(f"{output}.losses.json").stat().st_mtime_ns
    assert main([str(word) for word in ["--dry-run", *words]]) == 0
    assert Path(f"{output}.losses.json").stat().st_mtime_ns == measured
