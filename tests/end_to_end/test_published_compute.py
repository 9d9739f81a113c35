"""Published models without a recorded folder: matrices are what llama.cpp multiplies, and files complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
import gguf_tools.commands.imatrix
import imatrix
from gguf_tools import open_gguf
from gguf_tools.errors import UnsupportedCheckpoint
from imatrix.forward.open import open_model
from imatrix.texts.mixture import read_text
from imatrix.texts.tokens import Cut
from quantize.roles import layer_of
from tests.end_to_end.arch_models import GOLDEN
from tests.end_to_end.test_complete import complete
from tests.support import oracle
from tests.support.oracle.activations import Sums, observed
from tests.support.published_models import PUBLISHED, write

pytest.importorskip("torch")
import imatrix.forward.layers.activations as activations
import imatrix.forward.layers.gemma4 as gemma4

pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

CHUNK = 128
"""Tokens of a chunk; GLM-5 attends to 16 of them, and two of its layers take over the choice of another."""

TEXT = (GOLDEN.parents[2] / "examples" / "tiny-deepseek-v3" / "calibration.txt").read_text(encoding="utf-8")
ALLOWED = {"glm-5": 0.01, "minimax-m3": 0.01}
"""Models whose choice of positions depends on rounding, as llama.cpp rounds -> how far sums may be off."""

TABLES = {"starcoder2": 1e-3, "gemma-2": 1e-3, "gemma-3": 1e-3, "gemma-4": 1e-3, "gemma-4-moe": 1e-3,
          "gemma-4-e": 1e-3, "gemma-4-12b": 1e-3, "gemma-3n": 5e-3}  # fmt: skip
"""Models whose GELU llama.cpp looks up in a table of F16, as we do here -> the same."""

CODED = ("kimi-k3",)
"""Models with experts in MXFP4: llama.cpp rounds what these multiply, and some tokens go to other experts."""

QUICK = ("glm-5", "minimax-m2", "qwen3.5-moe")
"""Models that every run of the suite computes: one of each kind of attention."""

ENCODERS = ("embeddinggemma", "embeddinggemma-dense")
"""Models that predict no tokens."""

BY_CHANCE = ("glm-5.3-shared",)
"""A model that has pools of positions with equal scores, so that which are chosen is chance."""

MODELS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
          for name in PUBLISHED if name not in ENCODERS]  # fmt: skip
COMPARED = [each for each in MODELS if isinstance(each, str) or each.values[0] not in (*CODED, *BY_CHANCE)]


def collect(folder: Path) -> tuple[Path, list[int]]:
    """Collect importances of one chunk of the model in `folder`; return the matrix and the tokens."""
    text, matrix = folder / "text.txt", folder / "matrix.gguf"
    text.write_text(TEXT, encoding="utf-8")
    words = ["-m", str(folder), "-f", str(text), "-o", str(matrix), "-c", str(CHUNK), "--chunks", "1"]
    assert gguf_tools.commands.imatrix.main([*words, "--no-ppl", "--dtype", "float32"]) == 0
    with open_model(folder) as source:
        vocab_size = source.network.vocab_size
        chunks = read_text(text, source.vocab(), vocab_size, Cut(CHUNK, n_chunks=1))
    return matrix, chunks.inputs[0].tolist()


def in_half(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as llama.cpp has it, a table of F16."""
    return lambda x, **how: function(x.half().float(), **how).half().float()


def difference(entry: imatrix.Importance, sums: Sums) -> float:
    """Return the largest difference of sums, relative to the largest one; the counts must be the same."""
    found = entry.read().reshape(sums.squares.shape)
    assert (np.broadcast_to(entry.counts, sums.counts.shape) == sums.counts).all()
    return float(np.abs(found - sums.squares).max() / np.abs(sums.squares).max())


@pytest.mark.parametrize("name", COMPARED)
def test_importances_are_what_llama_cpp_multiplies(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "gelu", in_half(activations.gelu))
    monkeypatch.setattr(gemma4, "gelu", in_half(gemma4.gelu))
    folder = write(name, tmp_path / "model")
    stored, tokens = collect(folder)
    convert.convert(folder, tmp_path / "f32.gguf", outtype="f32")
    with oracle.Model(tmp_path / "f32.gguf") as model:
        sums = observed(model, tokens, as_shipped=name in ALLOWED)
    entries = imatrix.load(stored).entries
    in_layers = {matrix for matrix in sums if matrix.startswith("blk.")}
    # attn_kv_b is what both of its halves are made of; files of this layout don't have it. Nor do files made
    # without `mtp` have the MTP layer, behind the last one (tests/imatrix/forward/test_mtp.py).
    drafting = f"blk.{1 + max(layer_of(matrix) or 0 for matrix in in_layers)}."
    there = {entry for entry in entries if not entry.startswith(drafting)}
    assert {entry for entry in there if not entry.endswith("attn_kv_b.weight")} == in_layers
    limit = {**ALLOWED, **TABLES}.get(name, 1e-4)
    assert max(difference(entries[matrix], sums[matrix]) for matrix in in_layers) < limit


def test_an_encoder_is_refused_in_a_line(tmp_path: Path) -> None:
    folder = write(ENCODERS[0], tmp_path / "model")
    with pytest.raises(UnsupportedCheckpoint, match="an encoder, which predicts no tokens"):
        open_model(folder).__enter__()


@pytest.mark.parametrize("name", MODELS)
def test_mixed_files_complete_a_prompt(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path / "model")
    matrix, tokens = collect(folder)
    for file, importances in (("plain.gguf", None), ("matrix.gguf", imatrix.load(matrix))):
        out = tmp_path / file
        convert.convert(folder, out, outtype="Q4_K_M", importances=importances)
        with open_gguf(out) as opened:
            n_tokens = len(opened.metadata["tokenizer.ggml.tokens"].plain)
        completed = complete(out, tokens[:12])
        assert all(0 <= token < n_tokens for token in completed)
