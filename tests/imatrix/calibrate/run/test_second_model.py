"""What holds for the mixture of experts holds for the dense model in `examples/`, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
import gguf_tools
import quantize
from tests.support import oracle
from tests.support.trained_model import calibration_text

torch = pytest.importorskip("torch")

from imatrix.forward.open import open_model  # noqa: E402
from imatrix.texts.tokens import Cut  # noqa: E402
from tests.imatrix.forward.small_models import run_all_layers  # noqa: E402

FOLDER = Path(__file__).parents[4] / "examples" / "small-llama"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.gguf"
    convert.convert(FOLDER, path, outtype="f32")
    return path


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
def test_llama_cpp_computes_the_same(base: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 4096, (1, 64))
    with open_model(base) as source:
        expected, _ = run_all_layers(source, tokens)
    with oracle.Model(base) as model:
        found = model.logits(tokens[0].tolist())
    assert np.abs(found - expected[0]).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.slow
def test_a_calibrated_file_is_nearer_on_another_text(base: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(calibration_text())
    (tmp_path / "other.txt").write_bytes((FOLDER.parents[1] / "CHANGELOG.md").read_bytes())
    calibration = gguf_tools.Calibration(tmp_path / "text.txt", Cut(128, n_chunks=48))
    quantize.quantize(base, tmp_path / "stock.gguf", "Q3_K_M")
    options = quantize.QuantizeOptions(calibration=calibration)
    quantize.quantize(base, tmp_path / "calibrated.gguf", "Q3_K_M", options)
    files = [tmp_path / "stock.gguf", tmp_path / "calibrated.gguf"]
    cut = Cut(128, n_chunks=12)
    done = gguf_tools.evaluate(base, tmp_path / "other.txt", files, gguf_tools.EvaluateOptions(cut=cut))
    stock, calibrated = (model.divergence.kld.mean.value for model in done.models)
    assert calibrated < 0.5 * stock
