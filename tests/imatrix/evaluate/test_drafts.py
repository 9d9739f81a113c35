"""Drafts of MTP layers, measured: against llama.cpp's, against themselves, and kept for later runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import convert
import gguf_tools
from imatrix.evaluate.divergence import DRAFTS_ARE
from imatrix.evaluate.report.page import report_page
from imatrix.forward.open import open_model
from imatrix.forward.options import ForwardOptions
from imatrix.texts.mixture import read_text
from imatrix.texts.tokens import Cut
from quantize import quantize
from tests.support import oracle
from tests.support.checkpoints import Tensors, add_mtp_layer, edit_tensors
from tests.support.oracle.drafts import draft_logits
from tests.support.trained_model import trained_model

pytest.importorskip("torch")

OPTIONS = gguf_tools.EvaluateOptions(cut=Cut(64, n_chunks=4), forward=ForwardOptions(n_threads=1))


def repeats(tensors: Tensors) -> None:
    """Have the MTP layer repeat what the model has predicted a token before."""
    for name, tensor in tensors.items():
        if not name.startswith("model.layers.3."):
            continue
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensor)
        elif name.endswith("eh_proj.weight"):
            size = len(tensor)
            tensors[name] = np.concatenate([np.zeros((size, size)), np.eye(size)], 1).astype(tensor.dtype)
    tensors["model.layers.3.shared_head.norm.weight"] = tensors["model.norm.weight"]
    del tensors["model.layers.3.shared_head.head.weight"], tensors["model.layers.3.embed_tokens.weight"]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model with an MTP layer, in float32."""
    folder = add_mtp_layer(trained_model(tmp_path_factory.mktemp("model")))
    path = folder.parent / "base.gguf"
    convert.convert(edit_tensors(folder, repeats), path, outtype="f32", mtp=True)
    return path


@pytest.mark.slow
@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
def test_acceptance_is_that_of_llamas_logits(drafting: Path, text: Path, tmp_path: Path) -> None:
    quantize(drafting, tmp_path / "q4.gguf", "Q4_0")
    evaluation = gguf_tools.evaluate(drafting, text, [drafting, tmp_path / "q4.gguf"], OPTIONS)
    same, q4 = evaluation.models
    with open_model(drafting) as source:
        inputs = read_text(text, source.vocab(), 4096, OPTIONS.cut).inputs
    accepted = []
    with oracle.Model(drafting, mtp=True) as model:
        for chunk in inputs:
            own, draft = (
                logits[len(chunk) // 2 : -1].argmax(-1)
                for logits in (model.logits(chunk.tolist()), draft_logits(model, chunk.tolist()))
            )
            accepted.append(own == draft)
    assert same.drafts is not None
    assert q4.drafts is not None
    assert 0 < np.mean(accepted) < 1
    assert same.drafts.accepted.value == same.drafts.base_accepted.value == np.mean(accepted)
    assert q4.drafts.base_accepted == same.drafts.accepted
    assert same.drafts.kld.mean.value == 0
    assert same.drafts.same_top.value == 1
    assert 0 < q4.drafts.kld.mean.value < 1
    shown = f"{q4.drafts.accepted.value:.2%}"
    lines = evaluation.lines()
    line = lines[lines.index(DRAFTS_ARE) + 3]
    assert [line.split()[0], *line.split()[-2:]] == ["q4.gguf", shown, f"{q4.drafts.base_accepted.value:.2%}"]
    assert f"<td>{shown}</td>" in report_page(evaluation)
    assert evaluation.rows()[1]["draft_accepted"] == q4.drafts.accepted.value


def test_kept_states_have_the_drafts(drafting: Path, text: Path, tmp_path: Path) -> None:
    quantize(drafting, tmp_path / "q4.gguf", "Q4_0")
    options = gguf_tools.EvaluateOptions(cut=OPTIONS.cut, forward=OPTIONS.forward, keep=tmp_path / "kept")
    first, again = (
        gguf_tools.evaluate(drafting, text, [tmp_path / "q4.gguf"], options).to_json() for _ in range(2)
    )
    assert json.dumps(first) == json.dumps(again)
    assert first["models"][0]["drafts"]["kld"]["mean"] > 0


def test_files_without_an_mtp_layer_draft_nothing(drafting: Path, text: Path, tmp_path: Path) -> None:
    folder = drafting.parent / "tiny-deepseek-v3"
    convert.convert(folder, tmp_path / "without.gguf", outtype="f32")
    first, second = gguf_tools.evaluate(folder, text, [tmp_path / "without.gguf", drafting], OPTIONS).models
    assert first.drafts is None
    assert "drafts" not in first.measures_json()
    assert second.drafts is not None
    assert second.drafts.kld.mean.value == 0
