"""JSON that every reader reads exactly."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from gguf_tools.text import MAX_EXACT, counted, for_json, json_line, json_text


@pytest.mark.parametrize("text_of", [json_text, json_line])
def test_numbers_that_a_reader_would_lose_are_texts(text_of: Callable[[object], str]) -> None:
    data = {"a": [MAX_EXACT, -MAX_EXACT, MAX_EXACT + 1, 2**64 - 1], "b": (float("inf"), True), "c": None}
    assert json.loads(text_of(data)) == {
        "a": [2**53, -(2**53), "9007199254740993", "18446744073709551615"],
        "b": ["inf", True],
        "c": None,
    }


def test_other_data_stay_as_they_are() -> None:
    data = {"a": [1, 2.5, "text", False, {"b": None}]}
    assert for_json(data) == data


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "file", "1 file"), (0, "warning", "0 warnings"), (1234, "entry", "1,234 entries"),
        (3, "layer", "3 layers"),
    ],
)  # fmt: skip
def test_a_number_has_its_noun_in_the_plural_unless_it_is_one(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text
