"""Types of other projects, a TYPE beside a size, a forgotten text: each is told for what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import gguf_tools.commands.evaluate
import gguf_tools.commands.imatrix
import gguf_tools.commands.main
import gguf_tools.commands.quantize
import gguf_tools.commands.sensitivity
from gguf_tools.errors import BadArgument, BadOverride
from quantize.plan.overrides import parse_overrides
from quantize.plan.recipes import FILE_TYPES, find_recipe

NEAREST = {
    "4": "Q4_K_M", "q4": "Q4_K_M", "int4": "Q4_K_M", "4bit": "Q4_K_M", "4-bit": "Q4_K_M", "w4a16": "Q4_K_M",
    "INT8": "Q8_0", "fp16": "F16", "FP8": "Q8_0", "AWQ": "Q4_K_M", "awq-4bit": "Q4_K_M", "GPTQ": "Q4_K_M",
    "gptq-int4": "Q4_K_M", "EXL2": "Q4_K_M", "exl2-4.0": "Q4_K_M", "bnb-4bit": "Q4_K_M", "nf4": "IQ4_NL",
    "mlx-4bit": "Q4_K_M", "UD-Q4_K_XL": "Q4_K_M", "ud-q2_k_xl": "Q2_K", "UD-IQ2_M": "IQ2_M",
    "UD-Q8_K_XL": "Q8_0",
    "Q4_K_XL": "Q4_K_M", "Q3_K_XL": "Q3_K_L", "Q4_K_L": "Q4_K_M", "Q6_K_L": "Q6_K", "i1-Q4_K_M": "Q4_K_M",
    "Q4_0_4_4": "Q4_0", "MXFP4": "MXFP4_MOE",
}  # fmt: skip


@pytest.mark.parametrize("name", NEAREST)
def test_the_nearest_type_is_named(name: str) -> None:
    with pytest.raises(
        BadArgument, match=f"^unknown file type '{name}': .*; the nearest here is {NEAREST[name]}$"
    ):
        find_recipe(name)
    assert NEAREST[name] in FILE_TYPES
    if name not in ("MXFP4", "Q4_0_4_4"):  # types of tensors
        with pytest.raises(BadOverride, match=r"is not a ggml type: .*the nearest here is"):
            parse_overrides([f"ffn={name}"])


def test_what_nobody_uses_is_unknown() -> None:
    for name in ("xyz", "Q7", "99", "XQ4_K_M"):
        with pytest.raises(BadArgument) as caught:
            find_recipe(name)
        assert "the nearest here" not in str(caught.value)
    assert find_recipe("IQ4_KS_R4").name == "IQ4_KS_R4"


def test_an_interleaved_mixture_is_made_by_repacking() -> None:
    with pytest.raises(BadArgument, match="make Q4_K_M, and interleave it with gguf-tools repack"):
        find_recipe("Q4_K_M_R4")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text("{}")
    (tmp_path / "text.txt").write_text("words")
    return tmp_path


@pytest.mark.parametrize("size", [["--size", "3.4bpw"], ["--vram", "1G", "--ram", "1G"]])
def test_a_type_beside_a_size_is_refused(
    size: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("Q4_K_M", "mine.yaml", "Q4_K_M,Q8_0"):
        words = [*size, "--losses", "l.json", "m.gguf", "o.gguf", kind]
        assert gguf_tools.commands.quantize.main(words) == 2
        assert f"{kind}: a size chooses the types, so leave TYPE out" in capsys.readouterr().err


@pytest.mark.parametrize("taken", ["m.gguf", "folder", "gone.gguf"])
def test_a_flag_that_took_the_model_for_its_text_says_so(
    taken: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for main, words in (
        (gguf_tools.commands.quantize.main, ["--calibrate", taken, "o.gguf", "Q4_K_M"]),
        (gguf_tools.commands.quantize.main, ["--evaluate", taken, "o.gguf", "Q4_K_M"]),
        (gguf_tools.commands.quantize.main, ["--size", "4bpw", "--sensitivity-text", taken, "o.gguf"]),
        (gguf_tools.commands.evaluate.main, ["base.gguf", "-f", taken, "q.gguf"]),
        (gguf_tools.commands.imatrix.main, ["-m", "x.gguf", "-f", taken, "-o", "o"]),
        (gguf_tools.commands.sensitivity.main, ["x.gguf", "-f", taken, "-o", "o"]),
        (gguf_tools.commands.main.main, ["cook", "x.gguf", "-f", taken, "--types", "Q4_0", "-o", "o"]),
        (gguf_tools.commands.main.main, ["refine", "x.gguf", "--base", "b", "-f", taken, "-o", "o"]),
        (gguf_tools.commands.main.main, ["audit", "x.gguf", "b", "-f", taken]),
    ):
        assert main(words) == 2
        assert f"{taken} is a model, but was taken for TEXT, which is missing" in capsys.readouterr().err


def test_a_name_on_the_hub_taken_for_a_text(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gguf_tools.commands.quantize.main(["--calibrate", "me/model", "o.gguf", "Q4_K_M"]) == 1
    assert "me/model: can't be read (No such file or directory), and --calibrate takes a text" in (
        capsys.readouterr().err
    )
