from __future__ import annotations

import re
from pathlib import Path

import pytest

from gguf_tools.commands.quantize import recipe_lines
from gguf_tools.errors import BadRequest
from gguf_tools.format.ggml_types import F16, by_name
from gguf_tools.format.tensors import TensorInfo
from quantize.formats.codecs import CODECS
from quantize.plan.decide import fit
from quantize.plan.ik_recipes import IK_RECIPES
from quantize.plan.model_facts import ModelFacts
from quantize.plan.overrides import parse_override
from quantize.plan.plan import build_plan
from quantize.plan.recipes import ALIASES, RECIPES, find_recipe
from tests.quantize.plan.recorded_plans import recorded


def test_every_recorded_file_type_has_a_recipe() -> None:
    known = {key.split("+")[0] for key in recorded("v3.plans")}
    assert set(RECIPES) == known | {"COPY"}


def test_numbers_are_unique_and_types_exist() -> None:
    numbers = [recipe.file_type for recipe in RECIPES.values() if recipe.file_type is not None]
    assert len(set(numbers)) == len(numbers)
    for recipe in RECIPES.values():
        for name in {rule.type for rule in recipe.rules} | recipe.need_importances:
            assert by_name(name).name == name


def test_no_rule_is_out_of_reach() -> None:
    """A rule behind an unconditional one for the same roles could never apply."""
    for recipe in RECIPES.values():
        done: set[object] = set()
        for rule in recipe.rules:
            assert not set(rule.roles) <= done, (recipe.name, rule)
            if not rule.when:
                done |= set(rule.roles)


@pytest.mark.parametrize(
    ("text", "name"),
    [("Q4_K_M", "Q4_K_M"), ("q4_k_m", "Q4_K_M"), ("Q4_K", "Q4_K_M"), ("q3_k", "Q3_K_M"), ("Q5_K", "Q5_K_M"),
     ("15", "Q4_K_M"), ("0", "F32"), ("32", "BF16"), ("copy", "COPY")],
)  # fmt: skip
def test_find_recipe(text: str, name: str) -> None:
    assert find_recipe(text) is RECIPES[name]


@pytest.mark.parametrize(("text", "name"), [("Q4_K_X", "Q4_K_S"), ("Q4_KM", "Q4_K_M"), ("iq2xxs", "IQ2_XXS")])
def test_a_mistyped_recipe_gets_the_nearest_name(text: str, name: str) -> None:
    with pytest.raises(BadRequest, match=f"unknown file type '{text}'; did you mean {name}\\?$"):
        find_recipe(text)


@pytest.mark.parametrize("text", ["", "44", "None", "-1", "15.gguf"])
def test_unknown_recipe(text: str) -> None:
    with pytest.raises(BadRequest, match=r"unknown file type .*; quantize --help lists them all"):
        find_recipe(text)


def test_aliases_name_recipes() -> None:
    assert set(ALIASES.values()) <= set(RECIPES)


@pytest.mark.parametrize(
    ("wanted", "instead"), [(name, row.falls_back_to) for name, row in CODECS.items() if row.falls_back_to]
)
def test_fallback_needs_a_smaller_block(wanted: str, instead: str) -> None:
    assert by_name(instead).block_elems == 32 < by_name(wanted).block_elems


def test_fit() -> None:
    assert fit(by_name("Q4_K"), 256) == (by_name("Q4_K"), "")
    why = "row length 128 is no multiple of 256: Q4_K -> Q5_0"
    assert fit(by_name("Q4_K"), 128) == (by_name("Q5_0"), why)
    for name in ("Q4_K", "Q8_0"):
        found = fit(by_name(name), 100)
        assert found is not None
        assert found[0].name == "F16"
    assert fit(by_name("Q1_0"), 64) is None


def test_a_named_type_takes_the_place_of_the_tables() -> None:
    named = parse_override("k_b=Q8_0")
    why = "row length 128 is no multiple of 256: Q4_K -> Q8_0 (fallback k_b=Q8_0)"
    assert fit(by_name("Q4_K"), 128, named) == (by_name("Q8_0"), why)
    assert fit(by_name("Q4_0"), 128, named) == fit(by_name("Q4_0"), 128)
    assert fit(by_name("Q4_K"), 100, named) is None


def test_help_says_which_file_types_need_importances() -> None:
    """As a plan of an ordinary model without any shows it."""
    lines = "\n".join(recipe_lines())
    named = set(re.findall(r"^  (\w+) +\d+  .*needs --imatrix", lines, re.MULTILINE))
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    names = [f"blk.{i}.{part}.weight" for i in range(8) for part in parts]
    tensors = [TensorInfo(name, (256, 256), F16) for name in ("token_embd.weight", "output.weight", *names)]
    facts = ModelFacts("llama", n_layers=8, n_heads=8, n_kv_heads=8)
    refused = {
        name
        for name, recipe in (RECIPES | IK_RECIPES).items()
        if build_plan(tensors, recipe, facts, allow_problems=True).problems
    }
    assert named == refused
    assert {"IQ2_XXS", "IQ3_XS", "Q2_K_S"} <= named


def test_the_page_says_what_types_do_with_importances() -> None:
    page = (Path(__file__).parents[3] / "docs" / "types.md").read_text(encoding="utf-8")
    row = re.compile(r"^\| (\w+) \| [\d.]+ \| (ignored|optional|needed|required) \|", re.MULTILINE)
    rows = dict(row.findall(page))
    assert len(rows) > 25
    assert rows == {name: CODECS[name].use.value for name in rows}
