"""A checkpoint of 4-bit integers keeps them: the file's weights are the source's own."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import convert
import gguf_tools
import gguf_tools.commands.convert
import gguf_tools.commands.main
from convert.sources import SourceOptions, plan_source
from gguf_tools import open_gguf
from gguf_tools.format.ggml_types import Q4_0
from quantize.fill.sources import GGUFTensor
from quantize.plan.decide import PlanOptions
from quantize.plan.overrides import parse_overrides
from tests.quantize.codecs import decode, encode
from tests.support.checkpoints import Tensors, edit_tensors
from tests.support.decoder_models import decoder_model
from tests.support.published_models import write


def rows_of(path: Path, name: str) -> np.ndarray:
    with open_gguf(path) as file:
        return GGUFTensor(file, name).read_rows(0, file.tensors[name].n_rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("kimi-k2-thinking", tmp_path_factory.mktemp("int4"))


def test_experts_of_kimi_k2_thinking(folder: Path, tmp_path: Path) -> None:
    """In groups of 32 with bfloat16 scales; what is not packed becomes what is asked for."""
    exact = convert.convert(folder, tmp_path / "f32.gguf", outtype="f32").paths[0]
    with plan_source(folder, tmp_path / "kept.gguf", "Q8_0", SourceOptions(keep_grid=True)) as run:
        plan = run.preparation.plan
        kept = run.execute().paths[0]
    types = {tensor.name: tensor.target_type.name for tensor in plan.tensors}
    experts = [name for name in types if "_exps" in name]
    assert experts
    assert {types[name] for name in experts} == {"Q4_0"}
    reasons = [tensor.reason for tensor in plan.tensors if tensor.name in experts]
    assert all(reason.endswith("grid of Q4_0, exactly") for reason in reasons), reasons
    assert types["blk.1.ffn_down_shexp.weight"] == "Q8_0"
    for name in experts:
        np.testing.assert_array_equal(rows_of(kept, name), rows_of(exact, name))


@pytest.mark.parametrize("others", ["f16", "q8_0", "Q6_K"])
def test_the_converter_keeps_them(others: str, folder: Path, tmp_path: Path) -> None:
    exact = convert.convert(folder, tmp_path / "f32.gguf", outtype="f32").paths[0]
    kept = tmp_path / "kept.gguf"
    words = [str(folder), "--outfile", str(kept), "--outtype", others, "--keep-grid", "-q"]
    assert gguf_tools.commands.convert.main(words) == 0
    with open_gguf(kept) as file:
        types = {name: info.type.name for name, info in file.tensors.items()}
    experts = [name for name in types if "_exps" in name]
    assert {types[name] for name in experts} == {"Q4_0"}
    assert types["token_embd.weight"] == others.upper().replace("Q6_K", "Q8_0")  # rows of 64 columns
    assert types["blk.1.ffn_gate_inp.weight"] == "F32"
    for name in experts:
        np.testing.assert_array_equal(rows_of(kept, name), rows_of(exact, name))


def test_files_of_floats_keep_them_too(folder: Path, tmp_path: Path) -> None:
    with plan_source(folder, tmp_path / "kept.gguf", "F16", SourceOptions(keep_grid=True)) as run:
        types = {tensor.name: tensor.target_type.name for tensor in run.preparation.plan.tensors}
    assert types["blk.1.ffn_up_exps.weight"] == "Q4_0"
    assert types["blk.1.ffn_up_shexp.weight"] == "F16"


def test_cooked_files_keep_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(" ".join(f"The {n} brown foxes jump over {n * n} dogs." for n in range(120)))
    words = ["cook", str(folder), "-f", "text.txt", "-c", "64", "--chunks", "2", "-o", "out", "-q"]
    assert gguf_tools.commands.main.main([*words, "--types", "Q8_0", "--keep-grid", "--name", "k2"]) == 0
    with open_gguf(tmp_path / "out" / "k2-Q8_0.gguf") as file:
        assert {info.type.name for name, info in file.tensors.items() if "_exps" in name} == {"Q4_0"}
    assert gguf_tools.commands.main.main([*words, "--types", "Q8_0", "--name", "k2"]) == 1
    assert "was begun with another --keep-grid" in capsys.readouterr().err
    assert gguf_tools.commands.main.main([*words, "--types", "4bpw", "--keep-grid"]) == 2
    assert "a size chooses the types of all tensors" in capsys.readouterr().err


def test_nothing_is_lost_of_the_source(folder: Path, tmp_path: Path) -> None:
    """With all else as it is, the divergence from the source's own weights is 0."""
    pytest.importorskip("torch")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"The {n} brown foxes jump over {n * n} lazy dogs." for n in range(120)))
    base = convert.convert(folder, tmp_path / "f32.gguf", outtype="f32").paths[0]
    files = []
    for keeps in (True, False):
        types = PlanOptions(overrides=parse_overrides([r"^(?!.*_exps).*=F32"]))
        options = SourceOptions(types=types, keep_grid=keeps)
        with plan_source(folder, tmp_path / f"{keeps}.gguf", "Q4_0", options) as run:
            files.append(run.execute().paths[0])
    kept, again = gguf_tools.evaluate(base, text, files, chunk_size=64, n_chunks=2).models
    assert kept.divergence.kld.mean.value < 1e-12 < again.divergence.kld.mean.value


def test_a_checkpoint_in_bfloat16_that_was_trained_for_q4_0(tmp_path: Path) -> None:
    """As Gemma's QAT checkpoints: each product of code and scale is rounded once more."""
    pytest.importorskip("transformers")
    decoder_model("gemma3", tmp_path / "hf")

    def onto_grid(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            weight = tensors[name].astype(np.float32)
            decoded = decode(Q4_0, encode(Q4_0, weight, None))
            tensors[name] = decoded.astype(ml_dtypes.bfloat16)

    folder = edit_tensors(tmp_path / "hf", onto_grid)
    exact = convert.convert(folder, tmp_path / "f32.gguf", outtype="f32").paths[0]
    with plan_source(folder, tmp_path / "kept.gguf", "Q8_0", SourceOptions(keep_grid=True)) as run:
        types = {tensor.name: tensor.target_type.name for tensor in run.preparation.plan.tensors}
        kept = run.execute().paths[0]
    on_grid = [name for name, type_ in types.items() if type_ == "Q4_0"]
    assert len(on_grid) == 7 * sum(name.endswith("attn_q.weight") for name in types)
    assert types["token_embd.weight"] == "Q8_0"
    for name in on_grid:
        np.testing.assert_allclose(rows_of(kept, name), rows_of(exact, name), rtol=2.0**-7)
