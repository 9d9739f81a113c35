"""A size and a text are enough: losses are measured, types chosen, and tensors calibrated as them."""

from __future__ import annotations

from pathlib import Path

import pytest

import gguf_tools
from convert.options import ConvertOptions
from convert.pipeline import plan_run
from gguf_tools import open_gguf
from gguf_tools.commands.quantize import main
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.values import Value
from quantize.plan.sensitivities import (
    Sensitivities,
    TensorSensitivity,
    read_sensitivities,
    write_sensitivities,
)
from tests.quantize.padding.ffn_files import METADATA, SHAPES, write_ffn_file

SAMPLE = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v3"


@pytest.fixture
def odd_model(tmp_path: Path) -> Path:
    """A model with dense blocks of 704 inner columns, which zeros make whole blocks of 256."""
    dense = {name: shape for name, shape in SHAPES.items() if not name.startswith("blk.1.")}
    shapes = {name: tuple(704 if n == 160 else n for n in shape) for name, shape in dense.items()}
    metadata = {**METADATA, "deepseek2.feed_forward_length": Value.u32(704)}
    return write_ffn_file(tmp_path / "odd.gguf", shapes, metadata)


@pytest.fixture
def losses(odd_model: Path) -> Path:
    """Losses of its tensors, of which Q2_K is much the best."""
    with open_gguf(odd_model) as file:
        shapes = {info.name: info.shape for info in file.tensors.values() if len(info.shape) > 1}
    types = ("Q2_K", "Q3_K", "Q4_0", "Q4_K", "Q5_0", "Q6_K", "Q8_0")
    damage = {name: (0.01 if name == "Q2_K" else 1) * 4.0 ** -by_name(name).bits_per_weight for name in types}
    tensors = {name: TensorSensitivity.of(shape, damage) for name, shape in shapes.items()}
    write_sensitivities(Sensitivities(tensors), odd_model.with_suffix(".json"))
    return odd_model.with_suffix(".json")


def test_the_function_makes_the_command_s_file(odd_model: Path, losses: Path, tmp_path: Path) -> None:
    """Zeros after inner sizes are tried by both."""
    words = ["--size", "3.5bpw", "--losses", losses, odd_model, tmp_path / "a.gguf"]
    assert main([str(word) for word in words]) == 0
    gguf_tools.quantize(odd_model, tmp_path / "b.gguf", "3.5bpw", losses=losses)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    with open_gguf(tmp_path / "b.gguf") as file:
        assert file.get("deepseek2.feed_forward_length") == 768
    gguf_tools.quantize(odd_model, tmp_path / "c.gguf", "3.5bpw", losses=losses, pad="off")
    with open_gguf(tmp_path / "c.gguf") as file:
        assert file.get("deepseek2.feed_forward_length") == 704


def test_several_sizes_from_one_set_of_losses(
    odd_model: Path, losses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["3.5bpw", "5bpw", "450KiB"]
    words = ["--size", ",".join(sizes), "--losses", losses, odd_model, tmp_path / "lite-{ftype}.gguf"]
    assert main([str(word) for word in words]) == 0
    assert capsys.readouterr().out.count("types chosen: ") == len(sizes)
    made = [path.read_bytes() for path in tmp_path.glob("lite-*bpw.gguf")]
    assert len(made) == len(sizes)
    for size in sizes:
        gguf_tools.quantize(odd_model, tmp_path / "alone.gguf", size, losses=losses, force=True)
        assert (tmp_path / "alone.gguf").read_bytes() in made


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
    assert main([str(word) for word in ["--dry-run", "--losses", f"{output}.losses.json", *words]]) == 0
    assert Path(f"{output}.losses.json").stat().st_mtime_ns == measured
