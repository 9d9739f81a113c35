"""Recognising a pre-tokenizer by what it does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from convert.tokenizer.pretokenizers import KNOWN, NAMES, canonical_steps, cuts_alike, find_pre_tokenizer
from gguf_tools.errors import BadTokenizer
from tests.support.tokenizer_files import tokenizer_json

PATH = Path("model/tokenizer.json")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BY_NAME = {known.name: known for known in KNOWN}


def split(regex: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def pipeline_of(name: str) -> list[dict[str, Any]]:
    return [*(split(step[1]) for step in BY_NAME[name].steps if step[0] == "split"), BYTES]


def find(pre_tokenizer: dict[str, Any] | None, ignore_merges: bool = False, name: str | None = None) -> str:
    return find_pre_tokenizer(PATH, pre_tokenizer, ignore_merges=ignore_merges, name=name)


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [("tiny", "deepseek-v3"), ("deepseek-v3", "deepseek-v3"), ("deepseek-llm", "deepseek-llm")],
)
def test_real_files(tokenizer: str, name: str) -> None:
    assert find(tokenizer_json(tokenizer)["pre_tokenizer"]) == name


def test_deepseek_coder() -> None:
    """As in deepseek-coder-6.7b-base."""
    digits = {"type": "Digits", "individual_digits": True}
    cjk = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
    parts = [split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split(cjk), digits, BYTES]
    assert find(sequence(*parts)) == "deepseek-coder"


def test_byte_level_with_its_own_regex_is_gpt_2() -> None:
    assert find({**BYTES, "use_regex": True}) == "gpt-2"


def test_ignore_merges_is_part_of_what_a_name_means() -> None:
    assert find(sequence(*pipeline_of("llama-bpe")), ignore_merges=True) == "llama-bpe"
    assert find(sequence(*pipeline_of("llama-bpe")), ignore_merges=False) == "dbrx"
    with pytest.raises(BadTokenizer, match="not recognised"):
        find(sequence(*pipeline_of("tekken")), ignore_merges=False)


V3 = pipeline_of("deepseek-v3")
OTHER_SPELLINGS = {
    "nested sequences": sequence(sequence(*V3[:2]), sequence(*V3[2:])),
    "escaped line ends": sequence(
        *V3[:2], split(V3[2]["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n")), BYTES
    ),
    "a count spelled out": sequence(split(r"\p{N}\p{N}?\p{N}?"), *V3[1:]),
    "a group around it": sequence(split(r"(?:\p{N}{1,3})"), *V3[1:]),
    "ranges split and reordered": sequence(V3[0], split("[\u3040-\u30ff一-龥]+"), *V3[2:]),
}


@pytest.mark.parametrize("pre_tokenizer", OTHER_SPELLINGS.values(), ids=OTHER_SPELLINGS.keys())
def test_other_spellings(pre_tokenizer: dict[str, Any]) -> None:
    assert find(pre_tokenizer) == "deepseek-v3"


NEAR_MISSES = {
    "two digits": sequence(split(r"\p{N}{1,2}"), *V3[1:]),
    "no marks beside letters": sequence(
        *V3[:2], split(V3[2]["pattern"]["Regex"].replace(r"[\p{L}\p{M}]", r"\p{L}")), BYTES
    ),
    "no kana": sequence(V3[0], split("[一-龥]+"), *V3[2:]),
    "one character less": sequence(V3[0], split("[一-龥\u3040-ゟ゠-ヾ]+"), *V3[2:]),
    "a space before every text": sequence(*V3[:3], {**BYTES, "add_prefix_space": True}),
    "another order": sequence(V3[2], V3[0], V3[1], BYTES),
    "no bytes": sequence(*V3[:3]),
    "white space only": {"type": "Whitespace"},
}


@pytest.mark.parametrize("pre_tokenizer", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_near_misses_are_not_taken_for_the_real_thing(pre_tokenizer: dict[str, Any]) -> None:
    with pytest.raises(BadTokenizer, match="not recognised"):
        find(pre_tokenizer)


def test_the_error_says_what_was_found_and_what_to_do() -> None:
    with pytest.raises(BadTokenizer) as caught:
        find(sequence(split("[0-9]+"), {"type": "Punctuation", "behavior": "Isolated"}, BYTES))
    message = str(caught.value)
    assert message.startswith(
        'model/tokenizer.json: pre-tokenizer not recognised: found split "[0-9]+" -> Punctuation'
    )
    assert "pre_tokenizer NAME" in message
    assert all(name in message for name in NAMES)
    assert "\n" not in message


@pytest.mark.parametrize("pre_tokenizer", [None, {}])
def test_no_pre_tokenizer(pre_tokenizer: dict[str, Any] | None) -> None:
    with pytest.raises(BadTokenizer, match="found none"):
        find(pre_tokenizer)


def test_a_pipeline_that_cannot_be_built() -> None:
    with pytest.raises(BadTokenizer, match=r"model/tokenizer\.json: pre_tokenizer can't be built"):
        find(sequence(split("[unclosed"), BYTES))


def test_a_name_is_taken_as_given() -> None:
    assert find({"type": "Whitespace"}, name="tekken") == "tekken"
    with pytest.raises(
        BadTokenizer, match=r"pre_tokenizer deepseek-v9: llama\.cpp has no such one; it has .*deepseek-v3"
    ):
        find(None, name="deepseek-v9")


def test_known_ones_are_told_apart() -> None:
    assert list(NAMES) == sorted(set(NAMES))
    assert set(BY_NAME) <= set(NAMES)
    for one, other in itertools.combinations(KNOWN, 2):
        if one.suits(other.ignore_merges):
            cuts = (each.build().pre_tokenize_str for each in (one, other))
            assert not cuts_alike(*cuts), (one.name, other.name)


def test_canonical_steps() -> None:
    pre_tokenizer = sequence(
        {"type": "Digits", "individual_digits": False},
        {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": True},
        {"type": "ByteLevel", "add_prefix_space": True, "use_regex": False},
    )
    assert canonical_steps(pre_tokenizer) == (
        ("split", r"\p{N}+", "Isolated"),
        ("split", "literally ' '", "Removed", "inverted"),
        ("prefix space",),
        ("bytes",),
    )
