"""Special tokens: which file is believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convert.tokenizer.files import Quirks
from convert.tokenizer.tokenizer import read_tokenizer
from tests.convert.tokenizer.small_tokenizers import added, put, read, small
from tests.support.tokenizer_files import copy_tokenizer

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


def template(single: list[str], pair: list[str]) -> dict[str, Any]:
    """A TemplateProcessing: A and B are the texts, anything else is a special token."""

    def element(name: str) -> dict[str, Any]:
        return {"Sequence" if name in "AB" else "SpecialToken": {"id": name, "type_id": 0}}

    special = {name: {"id": name, "ids": [0], "tokens": [name]} for name in {*single, *pair} - {"A", "B"}}
    elements = {"single": [element(name) for name in single], "pair": [element(name) for name in pair]}
    return {"type": "TemplateProcessing", **elements, "special_tokens": special}


BOTH_NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL_CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any], dict[str, int], dict[str, bool]]] = {
    "nothing said": (None, BOTH_NAMED, {"bos": 6, "eos": 7}, {}),
    "said by the config alone": (
        None, {**BOTH_NAMED, "add_bos_token": True, "add_eos_token": False}, {"bos": 6, "eos": 7},
        {"bos": True, "eos": False},
    ),
    "bytes only": (BYTE_LEVEL, BOTH_NAMED, {"bos": 6, "eos": 7}, {"bos": False, "eos": False}),
    "bytes only, but the config says so": (
        BYTE_LEVEL, {**BOTH_NAMED, "add_bos_token": True}, {"bos": 6, "eos": 7}, {"bos": True, "eos": False},
    ),
    "bos before": (
        template(["<s>", "A"], ["<s>", "A", "<s>", "B"]), BOTH_NAMED, {"bos": 6, "eos": 7},
        {"bos": True, "sep": False},
    ),
    "the template beats the config": (
        template(["<s>", "A"], ["<s>", "A", "B"]), {**BOTH_NAMED, "add_bos_token": False},
        {"bos": 6, "eos": 7}, {"bos": True},
    ),
    "the first token becomes bos": (
        template(["<s>", "A"], []), {"eos_token": "</s>"}, {"bos": 6, "eos": 7, "cls": 6}, {"bos": True},
    ),
    "another last token makes eos the end of a turn": (
        template(["A", "</s>"], []), {"bos_token": "<s>", "eos_token": "c"}, {"bos": 6, "eos": 7, "eot": 2},
        {"eos": True},
    ),
    "eos between two texts": (
        template(["<s>", "A"], ["<s>", "A", "</s>", "B"]), BOTH_NAMED, {"bos": 6, "eos": 7, "sep": 7},
        {"bos": True, "sep": True},
    ),
    "as in RoBERTa": (
        {"type": "RobertaProcessing", "sep": ["</s>", 7], "cls": ["<s>", 6], "trim_offsets": True,
         "add_prefix_space": False},
        BOTH_NAMED, {"bos": 6, "eos": 7, "sep": 7, "cls": 6}, {"bos": True, "eos": True, "sep": True},
    ),
    "a sequence of processors": (
        {"type": "Sequence", "processors": [BYTE_LEVEL, template(["<s>", "A"], [])]}, BOTH_NAMED,
        {"bos": 6, "eos": 7}, {"bos": True, "eos": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("post_processor", "config", "ids", "adds"), SPECIAL_CASES.values(), ids=SPECIAL_CASES.keys()
)
def test_special_tokens(
    post_processor: dict[str, Any] | None,
    config: dict[str, Any],
    ids: dict[str, int],
    adds: dict[str, bool],
    tmp_path: Path,
) -> None:
    folder = put(tmp_path, tokenizer_json=small(post_processor=post_processor), tokenizer_config_json=config)
    special = read(folder).special
    assert dict(special.ids) == ids
    assert dict(special.adds) == adds


def test_where_ids_are_looked_for(tmp_path: Path) -> None:
    """tokenizer_config.json, config.json, and for ends that are still open the other files."""
    folder = put(
        tmp_path,
        tokenizer_json=small(),
        tokenizer_config_json={"bos_token": "<s>"},
        special_tokens_map_json={"bos_token": "</s>", "unk_token": "a", "eos_token": "b"},
        generation_config_json={"bos_token_id": 3, "eos_token_id": [7, 2], "pad_token_id": 2},
    )
    assert read(folder, bos_token_id=1).special.ids == {"bos": 6, "eos": 1, "pad": 2}
    assert read(folder, eos_token_id=4).special.ids == {"bos": 6, "eos": 4, "pad": 2}
    (folder / "special_tokens_map.json").unlink()
    assert read(folder).special.ids == {"bos": 6, "pad": 2, "eos": 7}


@pytest.mark.parametrize("file_name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["bos", "eos", "pad"])
def test_the_first_of_several_ids_counts(kind: str, file_name: str, tmp_path: Path) -> None:
    stated = {f"{kind}_token_id": [5, 2]}
    put(tmp_path, tokenizer_json=small())
    if file_name == "generation_config.json":
        put(tmp_path, generation_config_json=stated)
    tokenizer = read(tmp_path, **({} if file_name == "generation_config.json" else stated))
    assert tokenizer.special.ids == {kind: 5}
    assert [note for note in tokenizer.notes if f"{file_name}: {kind}_token_id" in note]


def test_ends_of_a_text_besides_eos(tmp_path: Path) -> None:
    """llama.cpp knows some by their texts, and eot and eom by their ids; of the others there is a note."""
    more = [added(8, "<|im_end|>"), added(9, "<|user|>"), added(10, "<|stop|>")]
    content = small(added_tokens=[*small()["added_tokens"], *more])
    put(tmp_path, tokenizer_json=content, generation_config_json={"eos_token_id": [7, 10, 9]})
    tokenizer = read(tmp_path, eos_token_id=[7, 8, 9, True, 99], eot_token_id=9)
    assert tokenizer.special.ids == {"eos": 7}
    assert [note for note in tokenizer.notes if "eos_token_id" in note] == [
        "config.json: eos_token_id lists '<|user|>' (9), too: a GGUF file has one eos token, and llama.cpp"
        " goes on after these",
        "generation_config.json: eos_token_id lists '<|stop|>' (10), too: a GGUF file has one eos token, and"
        " llama.cpp goes on after these",
    ]
    quirks = Quirks(special_tokens={"eot": "<|user|>", "eom": "<|stop|>"})
    known = read_tokenizer(tmp_path, {"eos_token_id": [7, 8, 9]}, quirks=quirks)
    assert not [note for note in known.notes if "eos_token_id" in note]


def test_an_unknown_token_that_is_no_added_one_is_left_out(tmp_path: Path) -> None:
    """MiniMax-M2's is a word of the vocabulary; llama.cpp's converter writes no id for it."""
    folder = put(tmp_path, tokenizer_json=small(), tokenizer_config_json={**BOTH_NAMED, "unk_token": "ab"})
    assert read(folder).special.ids == {"bos": 6, "eos": 7}
    assert read(folder, unk_token_id=4).special.ids == {"bos": 6, "eos": 7, "unk": 4}


def test_an_id_that_is_no_token_is_left_out(tmp_path: Path) -> None:
    tokenizer = read(put(tmp_path, tokenizer_json=small()), eos_token_id=7, pad_token_id=-1, unk_token_id=8)
    assert tokenizer.special.ids == {"eos": 7}
    assert [note for note in tokenizer.notes if "left out" in note] == [
        "config.json: unk token id 8 is none of 8: left out",
        "config.json: pad token id -1 is none of 8: left out",
    ]
    assert f"no bos token found in {tmp_path}" in tokenizer.notes


def test_a_broken_generation_config_counts_as_none(tmp_path: Path) -> None:
    put(tmp_path, tokenizer_json=small(), generation_config_json="{")
    assert read(tmp_path, eos_token_id=7).special.ids == {"eos": 7}


def test_add_bos_of_deepseek_v2(tmp_path: Path) -> None:
    """Its config says add_bos_token, its post-processor (ByteLevel) adds nothing: the config is believed."""
    tokenizer = read(copy_tokenizer("deepseek-llm", tmp_path), 102400)
    assert tokenizer.special.adds == {"bos": True, "eos": False}
    assert (
        "add_bos_token: true, as tokenizer_config.json says; tokenizer.json's post-processor adds none"
        in (tokenizer.notes)
    )
