"""Models whose weights are changed while a text goes through them: no numbers of two models come out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import quantize  # noqa: E402
from gguf_tools import ChangedInput  # noqa: E402
from gguf_tools.files.leftovers import forget  # noqa: E402
from gguf_tools.files.owned_folder import work_path  # noqa: E402
from gguf_tools.progress import NoReport  # noqa: E402
from imatrix.calibrate.calibration import Calibration  # noqa: E402
from imatrix.collecting import collect_beside  # noqa: E402
from imatrix.evaluate.options import EvaluateOptions  # noqa: E402
from imatrix.evaluate.pipeline import evaluate  # noqa: E402
from imatrix.options import CollectOptions  # noqa: E402
from imatrix.sensitivities.measure import SensitivityOptions, sensitivity  # noqa: E402
from imatrix.texts.tokens import Cut  # noqa: E402
from tests.hostile.test_changed_inputs import after_chunks, change  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v3"
TEXT = EXAMPLE / "calibration.txt"
CUT = Cut(chunk_size=64, n_chunks=2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(EXAMPLE, tmp_path / "model")


@pytest.fixture
def weights(model: Path) -> Path:
    return model / "model.safetensors"


class After(NoReport):
    """Acts when so many layers, about, have been computed."""

    def __init__(self, layers: float, act: Callable[[], object]) -> None:
        self._left, self._act = layers, act

    def advance(self, amount: float) -> None:
        before, self._left = self._left, self._left - amount
        if before > 0 >= self._left:
            self._act()


@pytest.mark.parametrize("layers", [0.5, 1.5, 2.9])
def test_importances(model: Path, weights: Path, tmp_path: Path, layers: float) -> None:
    options, output, good = CollectOptions(cut=CUT), tmp_path / "out", weights.read_bytes()
    expected = collect_beside(model, TEXT, output, options).importances.entries
    forget(work_path(output))
    with pytest.raises(ChangedInput, match=r"model\.safetensors: was changed while it was read"):
        collect_beside(model, TEXT, output, options, After(layers, lambda: change(weights, 0.01)))
    weights.write_bytes(good)
    found = collect_beside(model, TEXT, output, options).importances.entries
    assert found.keys() == expected.keys()
    for name, entry in expected.items():
        np.testing.assert_array_equal(found[name].read(), entry.read(), err_msg=name)


def test_importances_of_a_model_that_was_changed_after_a_kill(
    model: Path, weights: Path, tmp_path: Path
) -> None:
    def kill() -> None:
        raise KeyboardInterrupt

    options = CollectOptions(cut=CUT)
    with pytest.raises(KeyboardInterrupt):
        collect_beside(model, TEXT, tmp_path / "out", options, After(1.5, kill))
    change(weights, 0.01)
    with pytest.raises(Exception, match="begun with another model"):
        collect_beside(model, TEXT, tmp_path / "out", options)


@pytest.mark.slow
def test_an_evaluation(model: Path, weights: Path, tmp_path: Path) -> None:
    other = shutil.copytree(EXAMPLE, tmp_path / "other")
    options = EvaluateOptions(cut=CUT, work=tmp_path / "work")
    for number, path in enumerate((weights, other / "model.safetensors")):
        good = path.read_bytes()
        with pytest.raises(ChangedInput, match=f"{path}: was changed"):
            evaluate(model, TEXT, [other], options, After(0.5 + 5 * number, partial(change, path, 0.01)))
        path.write_bytes(good)
    assert evaluate(model, TEXT, [other], options).models[0].divergence.kld.mean.value < 1e-9


def test_a_sensitivity(model: Path, weights: Path, tmp_path: Path) -> None:
    options = SensitivityOptions(cut=CUT, types=("Q4_0",), rows=8, least_rows=1, tokens=64)
    with pytest.raises(ChangedInput, match=r"model\.safetensors: was changed"):
        sensitivity(model, TEXT, tmp_path / "out", options, After(3.5, lambda: change(weights, 0.01)))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_calibration(model: Path, weights: Path, tmp_path: Path) -> None:
    import convert

    source = tmp_path / "in.gguf"
    convert.convert(model, source, outtype="bf16")
    with pytest.raises(Exception, match=r"in\.gguf: was changed while it was read"):
        quantize.quantize(
            source, tmp_path / "out.gguf", "Q4_0", n_threads=1,
            calibration=Calibration(TEXT, cut=CUT, sequential=False, method="one-sided", embedding=False),
            progress=after_chunks(12, lambda: change(source, 0.5)),
        )  # fmt: skip
    assert not (tmp_path / "out.gguf").exists()
