"""A file that somebody else made, with a pre-tokenizer that no family here writes, in every command."""

from __future__ import annotations

from pathlib import Path

import pytest

import gguf_tools.commands.convert
import gguf_tools.commands.evaluate
import gguf_tools.commands.imatrix
import gguf_tools.commands.quantize
from tests.end_to_end.arch_models import GOLDEN
from tests.support.trained_model import EXAMPLE


def test_smollm_is_computable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    model, matrix, small = (str(tmp_path / name) for name in ("model.gguf", "matrix.gguf", "small.gguf"))
    text = ("-c", "64", "--chunks", "2")
    source = str(GOLDEN / "models" / "llama-r1-distill")
    convert = ["--outtype", "f32", "--pre-tokenizer", "smollm", "--outfile", model, source]
    assert gguf_tools.commands.convert.main(convert) == 0
    calibration = str(EXAMPLE / "calibration.txt")
    assert gguf_tools.commands.imatrix.main(["-m", model, "-f", calibration, "-o", matrix, *text]) == 0
    words = ["--imatrix", matrix, "--calibrate", calibration, *text, model, small, "Q4_K_M"]
    assert gguf_tools.commands.quantize.main(words) == 0
    assert "calibrated " in capsys.readouterr().out
    assert gguf_tools.commands.evaluate.main([model, small, "-f", calibration, *text]) == 0
