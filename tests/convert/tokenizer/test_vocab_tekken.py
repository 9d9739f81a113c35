"""Mistral's tekken.json: it is read for every family that has no tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convert.architectures import find_architecture, supported
from convert.tokenizer.tokenizer import read_tokenizer
from gguf_tools.errors import BadTokenizer
from tests.convert.tokenizer.small_tokenizers import put, small, tekken_json, write_vocab_file
from tests.support import oracle

BESIDE: dict[str, dict[str, Any]] = {
    "alone": {},
    "with a configuration": {
        "tokenizer_config_json": {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
    },
    "with a tokenizer.model": {"tokenizer_model": "of an older model"},
}
MISTRALS = tuple(name for name in supported() if "istral" in name or "Mixtral" in name)


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE.keys())
@pytest.mark.parametrize("family", [*MISTRALS, "LlamaForCausalLM"])
def test_every_mistral_reads_it(family: str, beside: dict[str, Any], tmp_path: Path) -> None:
    put(tmp_path, tekken_json=tekken_json(), **beside)
    quirks = find_architecture({"architectures": [family]}).quirks
    tokenizer = read_tokenizer(tmp_path, {"vocab_size": 320}, quirks=quirks)
    assert (tokenizer.model, tokenizer.pre, tokenizer.notes) == ("gpt2", "tekken", ())
    assert tokenizer.special.ids == {"bos": 1, "eos": 2, "unk": 0, "pad": 5}
    assert tokenizer.special.adds == {"bos": True, "eos": False}


def test_a_tokenizer_json_counts_before_it(tmp_path: Path) -> None:
    put(tmp_path, tekken_json=tekken_json(), tokenizer_json=small())
    assert read_tokenizer(tmp_path, {}).pre == "deepseek-v3"


def test_chat_template_of_the_configuration(tmp_path: Path) -> None:
    put(tmp_path, tekken_json=tekken_json(), tokenizer_config_json={"chat_template": "{{ x }}"})
    assert read_tokenizer(tmp_path, {}).chat_templates.default == "{{ x }}"


def test_special_tokens_of_older_files(tmp_path: Path) -> None:
    content = {key: value for key, value in tekken_json(400).items() if key != "special_tokens"}
    content["config"]["default_num_special_tokens"] = 39
    put(tmp_path, tekken_json=content)
    tokenizer = read_tokenizer(tmp_path, {})
    assert tokenizer.vocab.tokens[:4] == ("<unk>", "<s>", "</s>", "[INST]")
    assert tokenizer.vocab.tokens[19:21] == ("[TOOL_CONTENT]", "<SPECIAL_20>")
    assert tokenizer.special.ids == {"bos": 1, "eos": 2, "unk": 0, "pad": 11}


def test_another_size_is_refused(tmp_path: Path) -> None:
    put(tmp_path, tekken_json=tekken_json(), config_json={})
    with pytest.raises(BadTokenizer, match=r"320 tokens, but config\.json says vocab_size 321"):
        read_tokenizer(tmp_path, {"vocab_size": 321})


@pytest.mark.skipif(not oracle.available(), reason="the xllamacpp wheel is not installed")
def test_ids(tmp_path: Path) -> None:
    """A word that is a token is not cut; of others, the neighbours with the lowest rank are merged first."""
    put(tmp_path, tekken_json=tekken_json())
    vocab = write_vocab_file(tmp_path / "vocab.gguf", read_tokenizer(tmp_path, {}))
    id_of = {text: number for number, text in enumerate(read_tokenizer(tmp_path, {}).vocab.tokens)}
    with oracle.Model(vocab, vocab_only=True) as model:
        for text, pieces in ("the then", ["the", "Ġthe", "n"]), ("there", ["the", "r", "e"]):
            assert model.tokenize(text) == [id_of[piece] for piece in pieces]
