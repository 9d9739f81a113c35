"""Calibrated runs and refinements on another device than the CPU: every tensor is where it is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import calibrate
import convert
from gguf_tools.format.shards import open_gguf
from quantize import quantize
from tests.calibrate.words import write_words
from tests.support.decoder_models import decoder_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from calibrate.refine.pipeline import refine  # noqa: E402
from forward.options import ForwardOptions  # noqa: E402
from forward.text.tokens import Cut  # noqa: E402


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.forward.pretended_device import keep_to_one_thread

    keep_to_one_thread(monkeypatch, "calibrate.refine.gradients", "calibrate.run.report")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("text") / "text.txt", 4000)


def model(folder: Path, name: str) -> Path:
    """Write a small F32 file."""
    decoder_model(name, folder / "hf", hidden_size=256, intermediate_size=256)
    convert.convert(folder / "hf", folder / "base.gguf", outtype="f32")
    return folder / "base.gguf"


def assert_alike(base: Path, here: Path, there: Path) -> None:
    """Compare errors: sums come in another order elsewhere, so some weights are rounded the other way."""
    with open_gguf(base) as original, open_gguf(here) as one, open_gguf(there) as other:
        assert [*one.tensors] == [*other.tensors]
        ratios = []
        for name in one.tensors:
            aim, *found = (file.values(name).astype(np.float32) for file in (original, one, other))
            expected, error = (float(np.square(each - aim).mean()) for each in found)
            ratios.append(error / expected if expected else 1 + error)
        np.testing.assert_array_less(np.abs(np.log(ratios)), np.log(2))
        assert abs(np.log(ratios).mean()) < 0.1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [pytest.param("llama-biases", marks=pytest.mark.slow), "qwen3moe"])
def test_another_device_calibrates_alike(name: str, text: Path, tmp_path: Path) -> None:
    from tests.forward.pretended_device import pretended

    base = model(tmp_path, name)

    def made(to: str, device: str) -> Path:
        how = calibrate.Calibration(text, Cut(64, n_chunks=10), forward=ForwardOptions(device=device))
        quantize(base, tmp_path / to, "Q4_K_M", calibration=how, n_threads=1)
        return tmp_path / to

    here = made("here.gguf", "cpu")
    with pretended() as device:
        assert_alike(base, here, made("there.gguf", str(device)))


@pytest.mark.usefixtures("one_thread")
def test_another_device_refines_alike(text: Path, tmp_path: Path) -> None:
    from tests.forward.pretended_device import pretended

    base = model(tmp_path, "llama-biases")
    quantize(base, tmp_path / "file.gguf", "Q2_K")

    def made(to: str, device: str) -> Path:
        inputs = tmp_path / "file.gguf", base, text, tmp_path / to
        forward = ForwardOptions(device=device, n_threads=1)
        refine(*inputs, chunk_size=64, n_chunks=10, steps=2, passes=1, forward=forward)
        return tmp_path / to

    here = made("here.gguf", "cpu")
    with pretended() as device:
        assert_alike(base, here, made("there.gguf", str(device)))
