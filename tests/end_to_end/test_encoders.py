"""Encoders become files in which llama.cpp cuts, pools and ranks texts as the original does."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer

import convert
import imatrix
from convert.tokenizer.sentencepiece_model import read_sentencepiece_model
from gguf_tools import open_gguf
from gguf_tools.errors import BadConfig, UnsupportedCheckpoint
from tests.end_to_end.arch_models import GOLDEN
from tests.end_to_end.test_convert_published import described, keys
from tests.imatrix.forward.hostile_text import HOSTILE
from tests.support import oracle
from tests.support.checkpoints import edit_config
from tests.support.encoder_models import ENCODERS, write
from tests.support.published_models import write as write_published

RECORDED: dict[str, Any] = json.loads((GOLDEN / "encoders.json").read_text(encoding="utf-8"))
TEXT = "The list of the values that a function returns, in order: one, two (3)."
GATED = ("modern-bert", "nomic-bert")
_OTHERWISE = {"\u0085", "\u20e3"}
"""Characters that llama.cpp takes otherwise: a control character that is a space,
and an enclosing mark."""

needs_llama = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")


@pytest.mark.parametrize("name", RECORDED)
def test_equals_llama_cpps_converter(name: str, tmp_path: Path) -> None:
    convert.convert(write(name, tmp_path / "model"), tmp_path / "out.gguf", outtype="bf16")
    with open_gguf(tmp_path / "out.gguf") as file:
        assert sorted(keys(file)) == sorted(RECORDED[name]["keys"])
        lines = list(described(file))
    assert len(lines) == RECORDED[name]["n_tensors"]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == RECORDED[name]["sha256_of_tensors"]


@needs_llama
@pytest.mark.parametrize("name", ENCODERS)
def test_llama_cpp_computes_what_the_original_does(name: str, tmp_path: Path) -> None:
    folder, path = write(name, tmp_path / "model"), tmp_path / "out.gguf"
    convert.convert(folder, path, outtype="f32")
    published = Tokenizer.from_file(str(folder / "tokenizer.json"))
    kind = "AutoModelForSequenceClassification" if name.endswith("-rank") else "AutoModel"
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    with oracle.Model(path) as ours, torch.no_grad():
        ids = published.encode(TEXT).ids
        assert ours.tokenize(TEXT, add_special=True) == ids
        made = model(torch.tensor([ids]))
        if name.endswith("-rank"):
            expected = {"rank": made.logits[0]}
        else:
            hidden = made.last_hidden_state[0]
            expected = {"mean": hidden.mean(0), "cls": hidden[0]}
        for pooling, vector in expected.items():
            found = ours.pooled(ids, pooling, len(vector))
            limit = 1e-5 if name.startswith(GATED) else 5e-4  # GELU alone is a table of F16 there
            assert np.linalg.norm(found - vector.numpy()) < limit * np.linalg.norm(vector.numpy())


def charsmap(folder: Path) -> bytes:
    """Return the table of characters that SentencePiece gives to all models, XLM-RoBERTa's among them."""
    with (folder / "trained.model").open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(["a b"]), model_writer=file, vocab_size=6, hard_vocab_limit=False,
            minloglevel=2,
        )  # fmt: skip
    return read_sentencepiece_model(folder / "trained.model").normalizer.charsmap


@needs_llama
def test_a_gemma_whose_tokens_see_later_ones(tmp_path: Path) -> None:
    folder, path = write_published("embeddinggemma", tmp_path / "model"), tmp_path / "out.gguf"
    convert.convert(folder, path, outtype="f32")
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [5 + 7 * number % 500 for number in range(60)]  # more than a window
    with oracle.Model(path) as ours, torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
        found = ours.pooled(ids, "mean", hidden.shape[1])
    expected = hidden.mean(0).numpy()
    assert np.linalg.norm(found - expected) < 2e-3 * np.linalg.norm(expected)  # GELU is a table of F16 there


@needs_llama
@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_tokens_are_the_originals(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path / "model", *([charsmap(tmp_path)] if name == "xlm-roberta" else []))
    convert.convert(folder, tmp_path / "out.gguf", vocab_only=True)
    published = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with oracle.Model(tmp_path / "out.gguf", vocab_only=True) as model:
        for text in HOSTILE:
            if _OTHERWISE & set(text):
                continue
            assert model.tokenize(text) == published.encode(text, add_special_tokens=False).ids


def test_what_is_added_to_embeddings_stays_as_it_is(tmp_path: Path) -> None:
    folder = write("xlm-roberta", tmp_path / "model")
    convert.convert(folder, tmp_path / "out.gguf", outtype="Q4_K_M")
    with open_gguf(tmp_path / "out.gguf") as file:
        types = {name: info.type.name for name, info in file.tensors.items()}
        assert types["position_embd.weight"] == types["token_types.weight"] == "F32"
        assert types["blk.0.ffn_up.weight"] != "F32"
        assert file.tensors["position_embd.weight"].shape == (128, 64)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a decoder": ({"is_decoder": True}, UnsupportedCheckpoint, "is_decoder is True, expected False: llama"),
    "another activation": ({"hidden_act": "relu"}, UnsupportedCheckpoint, "hidden_act is 'relu', expected"),
    "positions for padding alone": ({"max_position_embeddings": 2}, BadConfig, "expected more than 2"),
    "heads that do not fit": ({"num_attention_heads": 5}, BadConfig, r"a divisor of hidden_size \(64\)"),
    "a class without a name": (
        {"id2label": {"1": "A"}},
        BadConfig,
        "id2label is .*, expected an object with",
    ),
    "names that are a list": (
        {"id2label": ["A"]},
        BadConfig,
        "id2label is .*, expected an object with a name",
    ),
}


@pytest.mark.parametrize(("changes", "error", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_what_llama_cpp_has_no_place_for_is_refused(
    changes: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    folder = write("roberta-rank", tmp_path / "model")
    edit_config(folder, **changes)
    with pytest.raises(error, match=says):
        convert.convert(folder, tmp_path / "out.gguf")


def test_commands_that_predict_tokens_refuse_an_encoder(tmp_path: Path) -> None:
    folder = write("bert", tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT * 50)
    with pytest.raises(UnsupportedCheckpoint, match="'bert': convert-hf-to-gguf and quantize take such"):
        imatrix.collect(folder, tmp_path / "text.txt", tmp_path / "m.gguf")
