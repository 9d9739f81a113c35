"""Regular expressions that would never end, from recipes, command lines and configurations of strangers."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import regex

from gguf_tools.edit.header_edits import new_names_of
from gguf_tools.errors import BadArgument, BadOverride, BadRequest
from gguf_tools.expressions import Expression, parse_expression
from quantize.plan.overrides import parse_custom_q, parse_override_file
from quantize.plan.recipe_files import read_recipe_file

NAME = "blk.10.ffn_down_exps.weight"
ENDLESS = r"^(.|.)*[!?]"

SAME = (
    "ffn_(down|up)_exps", r"blk\.(\d|1[0-5])\.", "FFN", "^blk.*weight$", "a{e<=1}", "x{e}", "a{,3}z", "b{}",
    "{", r"\{", "[{]", r"\N{LATIN SMALL LETTER B}lk", "(?i)BLK", r"\S+$", "(?<!x)ffn", "(?P<a>b)lk",
    "w{1}e{1,2}", "(a?){20}lk", r"\bffn", "[^.]+$", "blk|(",
)  # fmt: skip


@pytest.mark.parametrize("text", SAME)
def test_means_what_it_means_to_python(text: str) -> None:
    try:
        expected = re.search(text, NAME, re.IGNORECASE)
    except re.error:
        with pytest.raises(BadRequest, match="is not a regular expression"):
            parse_expression(text, ignore_case=True)
        return
    assert parse_expression(text, ignore_case=True).matches(NAME) == (expected is not None)
    if expected is not None:
        assert parse_expression(text).replaced(r"<\g<0>>", NAME) == re.sub(text, r"<\g<0>>", NAME)


def test_an_endless_one_is_given_up_once_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gguf_tools.expressions.PATIENCE", 0.1)
    expression = parse_expression(ENDLESS, place="t.txt: line 1: ")
    for _ in range(30):
        with pytest.raises(BadRequest, match=r"^t\.txt: line 1: .* takes more than 0.1 s to match names"):
            expression.matches(NAME)
    assert expression._used.seconds < 1


@pytest.mark.parametrize("text", ["a{9999999}", "((a{1000}){1000}){1000}", "(" * 9000, "a{9}" * 9])
def test_what_would_fill_memory_is_refused(text: str) -> None:
    with pytest.raises(BadArgument, match="is not a regular expression") as caught:
        parse_expression(text, error=BadArgument)
    assert len(str(caught.value)) < 200


def test_all_readers_have_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gguf_tools.expressions.PATIENCE", 0.05)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"file_type: Q4_0\nfallback: ['{ENDLESS}=Q8_0']\n")
    rules = (
        *parse_override_file(f"{ENDLESS}=Q8_0\n", "t.txt"),
        *parse_custom_q(f"{ENDLESS}=Q8_0"),
        *read_recipe_file(recipe).options.fallbacks,
    )
    for rule in rules:
        with pytest.raises(BadRequest, match="to match names"):
            rule.matches(NAME)
    with pytest.raises(BadRequest, match="to match names"):
        new_names_of([NAME], [(ENDLESS, "x")], "tensor", regex=True)
    with pytest.raises(BadOverride, match=r"^t\.txt: line 2: '\(=Q8_0': '\(' is not a regular expression"):
        parse_override_file("\n(=Q8_0", "t.txt")


def test_goes_to_other_processes() -> None:
    expression = parse_expression("ffn", ignore_case=True)
    assert expression.matches("FFN")
    copy = pickle.loads(pickle.dumps(expression))
    assert copy == expression == Expression("ffn", True)
    assert copy.matches("ffn")
    assert isinstance(copy.compiled, regex.Pattern)
