"""DeepSeek V4 measured and calibrated, as the other families are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import convert
import gguf_tools
import quantize
from gguf_tools import open_gguf
from tests.imatrix.forward.deepseek4_models import v4_model
from tests.support.trained_model import calibration_text

pytest.importorskip("torch")

from imatrix.forward.options import ForwardOptions
from imatrix.texts.tokens import Cut

FORWARD = ForwardOptions(n_threads=1)
OPTIONS = gguf_tools.EvaluateOptions(cut=Cut(64, n_chunks=3), forward=FORWARD)
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "q_lora_rank": 256, "head_dim": 128}
"""Sizes that fill blocks of 256."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return v4_model(tmp_path_factory.mktemp("v4") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(calibration_text())
    return path


def test_evaluation_and_what_it_keeps(folder: Path, text: Path, tmp_path: Path) -> None:
    convert.convert(folder, tmp_path / "small.gguf", outtype="Q4_0")
    convert.convert(folder, tmp_path / "same.gguf", outtype="f32")
    files = [tmp_path / "same.gguf", tmp_path / "small.gguf"]
    expected = gguf_tools.evaluate(folder, text, files, OPTIONS)
    same, small = expected.models
    assert same.divergence.kld.mean.value == 0
    assert small.divergence.kld.mean.value > 0.01
    assert [layer.drift for layer in same.layers] == [0, 0, 0]
    # The first layer's experts go by the ids of tokens.
    assert small.layers[0].routing_changed == 0
    assert small.layers[1].routing_changed > 0
    assert small.worst_layer.tensors[0].name.startswith(f"blk.{small.worst_layer.layer}.")
    keeping = replace(OPTIONS, keep=tmp_path / "kept")
    for _ in range(2):
        kept = gguf_tools.evaluate(folder, text, files[1:], keeping)
        assert kept.models[0].divergence == small.divergence
        assert kept.models[0].layers == small.layers


@pytest.mark.slow
def test_sensitivity_knows_every_matrix(folder: Path, text: Path, tmp_path: Path) -> None:
    options = gguf_tools.SensitivityOptions(cut=Cut(64, n_chunks=4), forward=FORWARD, types=("Q4_0", "Q8_0"))
    gguf_tools.sensitivity(folder, text, tmp_path / "losses.json", options)
    losses = json.loads((tmp_path / "losses.json").read_text())
    found = {name for name in str(losses).split("'") if name.startswith("blk.")}
    for name in ("hc_attn_fn", "attn_output_a", "attn_compressor_kv", "ffn_down_exps", "hc_ffn_fn"):
        assert f"blk.0.{name}.weight" in found


@pytest.mark.slow
@pytest.mark.parametrize(("sequential", "most"), [(True, 0.6), (False, 0.9)])
def test_a_calibrated_file_is_nearer(sequential: bool, most: float, text: Path, tmp_path: Path) -> None:
    model = tmp_path / "base.gguf"
    convert.convert(v4_model(tmp_path / "model", **WIDE), model, outtype="f32")
    quantize.quantize(model, tmp_path / "stock.gguf", "Q2_K")
    calibration = gguf_tools.Calibration(text, Cut(128, n_chunks=16), sequential=sequential)
    options = quantize.QuantizeOptions(calibration=calibration)
    quantize.quantize(model, tmp_path / "calibrated.gguf", "Q2_K", options)
    files = [tmp_path / "stock.gguf", tmp_path / "calibrated.gguf"]
    cut = Cut(128, n_chunks=16)
    done = gguf_tools.evaluate(model, text, files, gguf_tools.EvaluateOptions(cut=cut, forward=FORWARD))
    stock, calibrated = (model.divergence.kld.mean.value for model in done.models)
    assert calibrated < most * stock
    with open_gguf(files[0]) as one, open_gguf(files[1]) as other:
        assert {name: info.type for name, info in one.tensors.items()} == {
            name: info.type for name, info in other.tensors.items()
        }
        changed = [name for name in one.tensors if not np.array_equal(one.raw(name), other.raw(name))]
    for name in ("hc_attn_fn", "hc_ffn_fn", "attn_output_a", "attn_compressor_gate", "ffn_down_exps"):
        assert f"blk.0.{name}.weight" in changed
