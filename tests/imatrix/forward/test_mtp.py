"""Drafts of MTP layers against llama.cpp's, and what its matrices multiply there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from imatrix.forward.observe import Accumulator, Silent
from imatrix.forward.open import open_model
from imatrix.texts.tokens import Text
from tests.convert.f32_files import write_f32
from tests.end_to_end.arch_models import model as recorded_model
from tests.imatrix.forward.mtp_models import v3_with_mtp
from tests.imatrix.forward.small_models import CHUNKS
from tests.support import oracle
from tests.support.oracle.activations import sums_by_matrix
from tests.support.oracle.drafts import draft_logits
from tests.support.published_models import write

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from imatrix.forward.mtp import draft_head  # noqa: E402
from imatrix.forward.options import ForwardOptions  # noqa: E402
from imatrix.forward.run import forward_pass  # noqa: E402
from imatrix.forward.work_folder import WorkFolder  # noqa: E402
from tests.naive.mtp import WholeDraft  # noqa: E402

N_TOKENS = 48

YARN = {
    "max_position_embeddings": 2560,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0,
                        "mscale_all_dim": 1.0, "original_max_position_embeddings": 64},
}  # fmt: skip

MODELS: dict[str, Callable[[Path], Path]] = {
    "v3": v3_with_mtp,
    "v3 with YaRN": lambda folder: v3_with_mtp(folder, **YARN),
    "v3 with the model's ends": lambda folder: v3_with_mtp(folder, own_ends=False),
    "deepseek-v3.2": lambda folder: recorded_model("deepseek-v3.2"),
    "glm-4.7-flash": lambda folder: recorded_model("glm-4.7-flash"),
    "glm4moe-air": lambda folder: recorded_model("glm4moe-air"),
    "qwen3-next": lambda folder: write("qwen3-next", folder),
    "qwen3.5": lambda folder: write("qwen3.5", folder),
    "qwen3.5-moe": lambda folder: write("qwen3.5-moe", folder),
    "hy-v3": lambda folder: write("hy-v3", folder),
    "ling-3-flash": lambda folder: write("ling-3-flash", folder),
}


def draft(path: Path, tokens: np.ndarray, work: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the draft's logits, (n_chunks, n_tokens, n_vocab), and the sums of its layer."""
    torch.set_num_threads(1)
    observers = []

    def observe() -> Accumulator:
        observers.append(Accumulator())
        return observers[-1]

    with open_model(path) as source, WorkFolder(work, {}) as folder:
        chunks = Text(tokens, tokens).chunks
        options = ForwardOptions(device="cpu")
        with forward_pass(source, chunks, options, folder, lambda share: None) as forward:
            layers = list(forward.layers(observe))
            assert layers == [*range(source.network.n_layers), source.network.n_layers]
            head = draft_head(source.network, forward.load, forward.drafted())
            logits = head.logits(torch.arange(tokens.size), head.read(0, head.vocab_size))
    return logits.numpy().reshape(*tokens.shape, -1), observers[-1].sums()


def converted(name: str, tmp_path: Path) -> Path:
    """Write one of MODELS as an F32 file with its MTP layer."""
    folder, path = MODELS[name](tmp_path / name), tmp_path / "model.gguf"
    if name.startswith("v3"):
        return write_f32(folder, path, mtp=True)
    convert.convert(folder, path, outtype="f32", mtp=True)
    return path


needs_oracle = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")


@needs_oracle
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("hy-v3", "ling-3-flash") else name
        for name in MODELS
    ],
)
def test_drafts_equal_those_of_llama(name: str, tmp_path: Path) -> None:
    path = converted(name, tmp_path)
    with oracle.Model(path, mtp=True) as model:
        tokens = np.random.RandomState(7).randint(0, model.n_vocab, (2, N_TOKENS))
        expected = np.stack([draft_logits(model, chunk.tolist(), n_threads=1) for chunk in tokens])
    for source in (path, MODELS[name](tmp_path / "hf")):
        found, _ = draft(source, tokens, tmp_path / f"work {source.name}")
        # Delta nets magnify what is rounded.
        limit = 5e-5 if name.startswith("qwen") else 1e-5
        assert np.linalg.norm(found - expected) < limit * np.linalg.norm(expected), source


@needs_oracle
@pytest.mark.parametrize("name", ["v3", "glm4moe-air", "qwen3.5"])
def test_importances_equal_those_of_llama(name: str, tmp_path: Path) -> None:
    path = converted(name, tmp_path)
    with oracle.Model(path, mtp=True) as model:
        tokens = np.random.RandomState(7).randint(0, model.n_vocab, N_TOKENS)
        expected = sums_by_matrix(
            lambda observe: draft_logits(model, tokens.tolist(), n_threads=1, observe=observe)
        )
    _, found = draft(path, tokens[None], tmp_path / "work")
    in_layer = {matrix: sums for matrix, sums in expected.items() if ".nextn.shared_head" not in matrix}
    for matrix in in_layer.keys() - {"output.weight"}:
        error = np.linalg.norm(found[matrix].squares - expected[matrix].squares)
        assert error < 1e-4 * np.linalg.norm(expected[matrix].squares), matrix
        counts = found[matrix].counts
        assert np.array_equal(counts, expected[matrix].counts[: len(counts)]), matrix


@pytest.mark.parametrize("own_ends", [True, False])
def test_drafts_are_those_of_the_published_module(own_ends: bool, tmp_path: Path) -> None:
    folder = v3_with_mtp(tmp_path / "hf", own_ends=own_ends)
    with torch.no_grad():
        expected = WholeDraft(folder).logits(torch.from_numpy(CHUNKS)).numpy()
    found, _ = draft(folder, CHUNKS, tmp_path / "work")
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_a_pass_that_is_done_has_both_ends(memory_bytes: int, tmp_path: Path) -> None:
    folder, chunks = v3_with_mtp(tmp_path / "hf", num_hidden_layers=2), Text(CHUNKS, CHUNKS).chunks
    options = ForwardOptions(device="cpu", memory_bytes=memory_bytes)
    found = []
    for n_layers in (3, 0):
        with (
            open_model(folder) as source,
            WorkFolder(tmp_path / "out", {}) as work,
            forward_pass(source, chunks, options, work, lambda share: None) as forward,
        ):
            assert len(list(forward.layers(Silent))) == n_layers
            ends = forward.last(), forward.drafted()
            found.append([end.read(0, chunks.n_tokens).clone() for end in ends])
    for first, again in zip(*found, strict=True):
        assert torch.equal(first, again)
