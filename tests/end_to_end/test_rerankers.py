"""Qwen 3 as a reranker: llama.cpp's ranking of our file is that of transformers' model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
from convert.architectures.reranker import label_ids
from gguf_tools.errors import BadTokenizer
from tests.support import oracle
from tests.support.checkpoints import load_transformers, read_config
from tests.support.published_models import write

IDS = np.random.RandomState(0).randint(3, 530, 40).tolist()


@pytest.mark.slow
@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
@pytest.mark.parametrize("name", ["qwen3-reranker", "qwen3-reranker-8b"])
def test_the_label_s_probabilities(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = write(name, tmp_path / "model")
    result = convert.convert(folder, tmp_path / "model.gguf", outtype="f32")
    told = [note for note in result.preparation.plan.notes if note.startswith("a reranker")]
    assert len(told) == (name == "qwen3-reranker-8b")
    with torch.no_grad():
        logits = load_transformers(folder)(torch.tensor([IDS])).logits[0, -1]
    expected = torch.softmax(logits[list(label_ids(folder, read_config(folder)))], 0)
    with oracle.Model(tmp_path / "model.gguf") as model:
        np.testing.assert_allclose(model.pooled(IDS, "rank", 2), expected, rtol=1e-5)


def test_a_vocabulary_without_the_labels_is_refused(tmp_path: Path) -> None:
    folder = write("qwen3-embedding", tmp_path / "Qwen3-Reranker-0.6B")
    with pytest.raises(BadTokenizer, match="no tokens 'yes' and 'no'"):
        convert.convert(folder, tmp_path / "model.gguf", outtype="f32")
