"""Files with holes, or with rows of another model: `gguf-tools verify --against` finds them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import convert
import quantize
from gguf_tools.commands.main import main
from gguf_tools.format.reader import GGUFFile
from quantize.plan.plan import PlanOptions
from tests.hostile.test_changed_inputs import write_source
from tests.support.checkpoints import micro_checkpoint
from tests.support.tokenizer_files import copy_tokenizer

TYPES = ("F16", "Q8_0", "Q4_K_S", "Q2_K", "IQ3_S", "TQ1_0", "COPY")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "in.gguf")


def overwrite(path: Path, tensor: str, row: int, n_rows: int, data: bytes | None = None) -> None:
    """Put zeros, or other data, in the place of some rows of a tensor."""
    with GGUFFile(path) as file:
        start, row_bytes = file.data_offset(tensor), file.tensor(tensor).row_bytes
    with open(path, "r+b") as stream:
        stream.seek(start + row * row_bytes)
        stream.write(bytes(n_rows * row_bytes) if data is None else data)


@pytest.mark.parametrize("type_", TYPES)
def test_holes_and_rows_from_elsewhere_are_found(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], type_: str
) -> None:
    output = tmp_path / "out.gguf"
    quantize.quantize(source, output, type_, types=PlanOptions(pure=True))
    words = ["verify", str(output), "--against", str(source), "-q"]
    assert main(words) == 0, capsys.readouterr().out
    with GGUFFile(output) as file:
        other = file.read_rows("blk.0.ffn_up.weight", 0, 64).tobytes()
    overwrite(output, "blk.1.ffn_gate.weight", 16, 48)
    overwrite(output, "blk.2.ffn_down.weight", 0, 64, other)
    assert main(["verify", str(output)]) == 0
    capsys.readouterr()
    assert main([*words, "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    bad = {each["tensor"]: each["text"] for each in findings if each["bad"]}
    assert sorted(bad) == ["blk.1.ffn_gate.weight", "blk.2.ffn_down.weight"]
    if type_ != "COPY":
        assert "are zeros, the source's are not" in bad["blk.1.ffn_gate.weight"]
        assert "do not resemble the source's" in bad["blk.2.ffn_down.weight"]


def test_errors_beyond_those_of_a_type_are_found(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantize.quantize(source, tmp_path / "low.gguf", "Q4_0")
    quantize.quantize(
        tmp_path / "low.gguf", tmp_path / "out.gguf", "Q8_0", types=PlanOptions(allow_requantize=True)
    )
    assert main(["verify", str(tmp_path / "out.gguf"), "--against", str(source), "-q"]) == 1
    assert "relative error" in capsys.readouterr().out


def test_another_model_is_said_to_be_one(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_source(tmp_path / "other.gguf", seed=1)
    quantize.quantize(source, tmp_path / "out.gguf", "Q4_0")
    assert main(["verify", str(tmp_path / "out.gguf"), "--against", str(other), "-q"]) == 1
    assert "9 bad findings" in capsys.readouterr().out


def test_a_file_is_compared_with_the_folder_that_it_was_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = micro_checkpoint(tmp_path / "model", "v3", vocab_size=4096)
    copy_tokenizer("tiny", model)
    output = tmp_path / "out.gguf"
    convert.convert(model, output, outtype="Q8_0")
    words = ["verify", str(output), "--against", str(model), "-q"]
    assert main(words) == 0, capsys.readouterr().out
    overwrite(output, "blk.1.ffn_up_exps.weight", 0, 8)
    assert main(words) == 1
    assert "blk.1.ffn_up_exps.weight: rows 0 to 4: are zeros" in capsys.readouterr().out


def test_rows_that_are_zeros_in_the_source_may_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_source(tmp_path / "in.gguf")
    with GGUFFile(source) as file:
        rows = file.array("blk.0.ffn_up.weight").copy()
    rows[::2] = 0
    overwrite(source, "blk.0.ffn_up.weight", 0, 64, np.ascontiguousarray(rows).tobytes())
    quantize.quantize(source, tmp_path / "out.gguf", "Q4_K_S")
    assert main(["verify", str(tmp_path / "out.gguf"), "--against", str(source), "-q"]) == 0
    capsys.readouterr()
