"""The noise floor: what the base loses to rounding, against files that are rounded so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gguf_tools
from gguf_tools.errors import BadRequest
from tests.imatrix.forward.float_files import files_of, scale
from tests.support.checkpoints import edit_tensors
from tests.support.trained_model import trained_model

torch = pytest.importorskip("torch")

from imatrix.forward.options import ForwardOptions  # noqa: E402
from imatrix.texts.tokens import Cut  # noqa: E402

Made = Callable[[str], Path]
OPTIONS = gguf_tools.EvaluateOptions(cut=Cut(64, n_chunks=3), forward=ForwardOptions(n_threads=1))


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the trained model, with weights that BF16 can't hold, as a file of float type."""
    folder = tmp_path_factory.mktemp("scaled")
    return files_of(edit_tensors(trained_model(folder), scale), folder)


def test_a_bf16_copy_costs_what_a_bf16_file_does(scaled: Made, text: Path) -> None:
    found = gguf_tools.evaluate(scaled("f32"), text, [scaled("bf16")], OPTIONS, noise_floor=True)
    noise, file = found.alone.noise, found.models[0].divergence
    assert noise is not None
    assert noise.weights is not None
    assert noise.weights == file
    assert noise.weights.kld.mean.value > 0
    assert noise.kld == max(noise.activations.kld.mean.value, noise.weights.kld.mean.value)
    assert [model.path.name for model in found.models] == ["bf16.gguf"], "the floor is no file"


def test_rounded_activations_cost_what_a_base_loses_like_llama_cpp(
    made: Made, text: Path, tmp_path: Path
) -> None:
    file, logits = made("Q8_0"), tmp_path / "base.kld"
    noise = gguf_tools.evaluate(file, text, [file], OPTIONS, noise_floor=True, logits=logits).alone.noise
    assert noise is not None
    assert noise.weights is None
    like = gguf_tools.evaluate(gguf_tools.LogitsFile(logits), None, [file], OPTIONS, like="llama.cpp").models[
        0
    ]
    assert noise.kld > 1e-5
    # A base in a file has 16 bits for a logit.
    assert noise.kld == pytest.approx(like.divergence.kld.mean.value, rel=0.02, abs=5e-6)


def test_a_bf16_base_has_no_floor_of_weights(made: Made, tiny_folder: Path, text: Path) -> None:
    found = gguf_tools.evaluate(tiny_folder, text, [made("Q8_0")], OPTIONS, noise_floor=True)
    assert found.alone.noise is not None
    assert found.alone.noise.weights is None
    assert found.alone.noise.kld == found.alone.noise.activations.kld.mean.value > 1e-5
    lines = found.lines()
    assert "BF16 weights cost nothing: rounding to BF16 changes no weight of the base" in lines
    assert any(line.startswith("8-bit activations ") for line in lines)
    said = found.to_json()["noise_floor"]
    assert said["bf16_weights"] is None
    assert said["kld"] == said["activations"]["kld"] == found.alone.noise.kld


def test_the_floor_changes_no_other_number(made: Made, text: Path) -> None:
    plain, floored = (
        gguf_tools.evaluate(made("F32"), text, [made("Q2_K")], OPTIONS, noise_floor=floor)
        for floor in (False, True)
    )
    assert plain.alone.noise is None
    assert "noise_floor" not in plain.to_json()
    assert floored.models[0].divergence == plain.models[0].divergence
    assert floored.models[0].layers == plain.models[0].layers


def test_a_run_that_was_interrupted_resumes_its_floor(
    made: Made, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gguf_tools.evaluate(made("F32"), text, [made("Q2_K")], OPTIONS, noise_floor=True)
    computed: list[tuple[str, int]] = []
    from imatrix.evaluate.bases import base

    compute = base.compute_layer

    def interrupted(model: Any, layer: int) -> Any:
        if len(computed) == 7:
            raise KeyboardInterrupt
        computed.append((model.folder.folder.name, layer))
        return compute(model, layer)

    work = tmp_path / "work"
    with monkeypatch.context() as patch:
        patch.setattr(base, "compute_layer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gguf_tools.evaluate(made("F32"), text, [made("Q2_K")], OPTIONS, noise_floor=True, work=work)
    found = gguf_tools.evaluate(made("F32"), text, [made("Q2_K")], OPTIONS, noise_floor=True, work=work)
    assert found.alone.noise == expected.alone.noise


def test_kept_states_have_a_floor_while_the_base_is_there(made: Made, text: Path, tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    expected = gguf_tools.evaluate(made("F32"), text, [made("Q2_K")], OPTIONS, noise_floor=True, keep=keep)
    found = gguf_tools.evaluate(made("F32"), text, [made("Q2_K")], OPTIONS, noise_floor=True, keep=keep)
    assert found.alone.noise == expected.alone.noise


def test_logits_alone_have_no_floor(made: Made, text: Path, tmp_path: Path) -> None:
    logits = tmp_path / "base.kld"
    gguf_tools.evaluate(made("F32"), text, [made("Q2_K")], OPTIONS, logits=logits)
    with pytest.raises(BadRequest, match=r"base\.kld: noise_floor=True computes the base, but"):
        gguf_tools.evaluate(gguf_tools.LogitsFile(logits), None, [made("Q2_K")], OPTIONS, noise_floor=True)
