"""Importances of an MTP layer, as a file has them and as quantizing at 2 bits needs them."""

from __future__ import annotations

from pathlib import Path

import pytest

import convert
import quantize
from gguf_tools import open_gguf
from gguf_tools.commands.imatrix import main
from imatrix.store import load
from tests.support.checkpoints import add_mtp_layer
from tests.support.trained_model import trained_model

pytest.importorskip("torch")


@pytest.mark.slow
def test_a_v3_at_2_bits_with_its_mtp_layer(calibration: Path, tmp_path: Path) -> None:
    folder, out = add_mtp_layer(trained_model(tmp_path)), tmp_path / "m.gguf"
    words = ["-m", str(folder), "-f", str(calibration), "-o", str(out), "--nextn", "--threads", "1"]
    assert main([*words, "-c", "64", "--chunks", "3", "--no-ppl"]) == 0
    entries = load(out).entries
    assert entries["blk.3.nextn.eh_proj.weight"].values.shape == (1, 2 * 256)
    assert entries["blk.3.nextn.shared_head_head.weight"].counts.tolist() == [3 * 64]
    assert "output.weight" not in entries
    convert.convert(folder, tmp_path / "bf16.gguf", outtype="bf16", mtp=True)
    quantize.quantize(tmp_path / "bf16.gguf", tmp_path / "out.gguf", "IQ2_XS", importances=entries)
    with open_gguf(tmp_path / "out.gguf") as file:
        types = {name: str(tensor.type) for name, tensor in file.tensors.items() if ".nextn." in name}
    assert types["blk.3.nextn.eh_proj.weight"] == types["blk.3.nextn.embed_tokens.weight"] == "IQ2_XS"
    convert.convert(folder, tmp_path / "without.gguf", outtype="bf16", mtp=False)
    assert main(["check", str(out), "--model", str(tmp_path / "without.gguf")]) == 0
