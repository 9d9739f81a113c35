"""Padded files compute what the model does, to the last bit, in llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
from gguf_tools import open_gguf
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.shards import FileLayout
from quantize import quantize
from quantize.importances.entries import Importance
from quantize.padding.inner_sizes import UNPADDED
from quantize.plan.decide import PlanOptions
from quantize.plan.overrides import parse_overrides
from tests.end_to_end import arch_models
from tests.support import oracle
from tests.support.decoder_models import CASES, decoder_model

pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

IDS = np.random.RandomState(0).randint(3, 250, 40).tolist()


def logits(path: Path) -> np.ndarray:
    with oracle.Model(path) as model:
        return model.logits(IDS)


FAST = ("glm4moe-air", "gpt-oss", "kimi-k2", "llama-r1-distill", "qwen3moe")
"""With dense blocks, routed and shared experts, biases, MXFP4, and latent attention. The others are slow."""


@pytest.mark.parametrize(
    "case",
    [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in arch_models.CASES],
)
def test_logits_are_the_model_s(case: str, tmp_path: Path) -> None:
    folder = arch_models.model(case)
    plain, padded = tmp_path / "plain.gguf", tmp_path / "padded.gguf"
    convert.convert(folder, plain, outtype="f32")
    convert.convert(folder, padded, outtype="f32", pad="256")
    with open_gguf(padded) as file:
        assert any(key.startswith(UNPADDED) for key in file.metadata)
        downs = [
            info for name, info in file.tensors.items() if "ffn_down" in name and name.endswith("weight")
        ]
        assert downs
        assert all(info.n_cols % 256 == 0 for info in downs)
    assert np.abs(logits(padded) - logits(plain)).max() == 0.0
    back = quantize(padded, tmp_path / "back.gguf", "COPY", pad="off", provenance=False).paths[0]
    whole = quantize(plain, tmp_path / "whole.gguf", "COPY", provenance=False).paths[0]
    assert back.read_bytes() == whole.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_of_other_decoders(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    decoder_model(name, tmp_path / name)
    plain, padded = (
        convert.convert(tmp_path / name, tmp_path / f"{pad}.gguf", outtype="f32", pad=pad)
        for pad in (None, "256")
    )
    assert padded.preparation.padding.pads
    assert np.abs(logits(padded.paths[0]) - logits(plain.paths[0])).max() == 0.0


@pytest.mark.parametrize("case", ["gpt-oss", "llama-r1-distill", "qwen2-r1-distill"])
def test_a_padded_hidden_size(case: str, tmp_path: Path) -> None:
    """From 64 to 256: norms are scaled by a power of two, so that nothing is rounded."""
    folder = arch_models.model(case)
    plain, padded = tmp_path / "plain.gguf", tmp_path / "padded.gguf"
    convert.convert(folder, plain, outtype="f32")
    convert.convert(folder, padded, outtype="f32", pad="256", pad_hidden=True)
    with open_gguf(padded) as file:
        assert {info.n_cols % 256 for info in file.tensors.values() if len(info.shape) > 1} == {0}
    assert np.abs(logits(padded) - logits(plain)).max() == 0.0


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q8_0"])
def test_stored_types_pass_through(type_name: str, tmp_path: Path) -> None:
    """Of the same stored weights, the padded file computes the same; 16-bit ones too."""
    plain = convert.convert(
        arch_models.model("qwen3moe"), tmp_path / "f.gguf", outtype=type_name.lower()
    ).paths[0]
    padded = quantize(plain, tmp_path / "padded.gguf", "COPY", pad="256").paths[0]
    assert np.abs(logits(padded) - logits(plain)).max() == 0.0


def zeroed(path: Path, to: Path, real: dict[str, int]) -> Path:
    """Copy an F32 file with zeros in the columns behind the real ones."""
    with open_gguf(path) as file:
        infos = list(file.tensors.values())
        layout = FileLayout.of(file.metadata, infos)
        with GGUFWriter(to, layout) as writer:
            for info in infos:
                rows = (
                    file.read_rows(info.name, 0, info.n_rows).view(np.float32).reshape(info.n_rows, -1).copy()
                )
                rows[:, real.get(info.name, info.n_cols) :] = 0
                writer.write(layout.offset_of(info.name), rows)
            writer.publish()
    return to


@pytest.mark.parametrize("type_name", ["IQ2_XXS", "IQ3_S"])
def test_what_a_type_makes_of_columns_of_zeros_reaches_nothing(type_name: str, tmp_path: Path) -> None:
    """Some types have no 0 for the end of a down matrix; its partners are rows of zeros."""
    folder = arch_models.model("glm4moe-air")
    with open_gguf(convert.convert(folder, tmp_path / "plain.gguf", outtype="f32").paths[0]) as file:
        real = {info.name: info.n_cols for info in file.tensors.values() if "ffn_down" in info.name}
    padded = convert.convert(folder, tmp_path / "padded.gguf", outtype="f32", pad="256").paths[0]
    entries = {
        name: Importance(np.ones((1, n_cols), np.float32), np.ones(1)) for name, n_cols in real.items()
    }
    options = PlanOptions(overrides=parse_overrides([f"ffn_down={type_name}", "weight=F32"]))
    coarse = quantize(padded, tmp_path / "q.gguf", "Q8_0", types=options, importances=entries).paths[0]
    whole = PlanOptions(allow_requantize=True)
    decoded = quantize(coarse, tmp_path / "d.gguf", "F32", types=whole).paths[0]
    clean = zeroed(decoded, tmp_path / "clean.gguf", real)
    assert clean.read_bytes() != decoded.read_bytes()
    assert np.abs(logits(decoded) - logits(clean)).max() == 0.0
