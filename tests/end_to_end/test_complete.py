"""Q4_K_M files of every family, made with a matrix and without, load in llama.cpp and complete a prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
import imatrix
from gguf_tools import open_gguf
from tests.end_to_end.arch_models import CASES, GOLDEN, model
from tests.support import oracle

pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

N_NEW = 8


def complete(path: Path, prompt: list[int]) -> list[int]:
    """Return the prompt with the likeliest tokens that llama.cpp adds to it, one after the other."""
    ids = list(prompt)
    with oracle.Model(path) as file:
        for _ in range(N_NEW):
            logits = file.logits(ids)[-1]
            assert np.isfinite(logits).all()
            ids.append(int(logits.argmax()))
    return ids


@pytest.mark.parametrize("with_matrix", [False, True], ids=["plain", "matrix"])
@pytest.mark.parametrize("case", CASES)
def test_a_mixed_file_completes_a_prompt(case: str, with_matrix: bool, tmp_path: Path) -> None:
    recorded = GOLDEN / "imatrix" / f"{case}.imatrix.gguf"
    importances = imatrix.load(recorded) if with_matrix else None
    out = tmp_path / "out.gguf"
    convert.convert(model(case), out, outtype="Q4_K_M", importances=importances)
    with open_gguf(out) as file:
        assert file.get("general.file_type") == 15
        n_tokens = len(file.metadata["tokenizer.ggml.tokens"].plain)
        assert ("quantize.imatrix.entries_count" in file.metadata) == with_matrix
    with np.load(GOLDEN / "logits" / f"{case}.npz") as golden:
        prompt = golden["ids"][:12].tolist()
    completed = complete(out, prompt)
    assert completed[: len(prompt)] == prompt
    assert all(0 <= token < n_tokens for token in completed[len(prompt) :])
