"""File types of ik_llama.cpp: plans equal those that its own llama-quantize prints."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from gguf_tools.errors import BadRequest
from gguf_tools.format.ggml_types import by_name
from quantize.importances.entries import Importance
from quantize.plan.decide import decide, draft
from quantize.plan.ik_recipes import IK_RECIPES
from quantize.plan.model_facts import ModelFacts
from quantize.plan.overrides import parse_overrides
from quantize.plan.plan import Plan, PlanOptions, build_plan
from quantize.plan.recipes import ALIASES, FILE_TYPES, RECIPES, find_recipe
from quantize.roles import tensor_role
from tests.quantize.plan.ik_layouts import MODELS, Model, model
from tests.quantize.plan.recorded_plans import recorded


@cache
def recorded_plans() -> dict[str, dict[str, Any]]:
    plans: dict[str, dict[str, Any]] = recorded("ik.plans")["plans"]
    return plans


def importances_of(chosen: Model) -> dict[str, Importance]:
    one = np.float32(1)
    return {
        tensor.name: Importance(
            np.broadcast_to(one, (tensor.n_mats, tensor.n_cols)), np.broadcast_to(one, tensor.n_mats)
        )
        for tensor in chosen.tensors
    }


def plan_of(chosen: Model, recipe: str, *, weighed: bool = False, **options: Any) -> Plan:
    return build_plan(
        chosen.tensors,
        IK_RECIPES[recipe],
        ModelFacts.from_metadata(chosen.metadata),
        importances=importances_of(chosen) if weighed else None,
        options=PlanOptions(**options),
        allow_problems=True,
    )


def types(plan: Plan) -> dict[str, str]:
    return {tensor.name: tensor.target_type.name for tensor in plan.tensors}


@pytest.mark.parametrize("name", MODELS)
def test_plans_equal_the_recorded_ones(name: str) -> None:
    chosen, recorded_of_model = model(name), recorded_plans()[name]
    facts = ModelFacts.from_metadata(chosen.metadata)
    drafts = [
        draft(each, each.name, tensor_role(each.name, each.shape, facts.architecture, "ik_llama.cpp").role)
        for each in chosen.tensors
    ]
    assert set(recorded_of_model) == {recipe + end for recipe in IK_RECIPES for end in ("", "+imatrix")}
    for key, runs in recorded_of_model.items():
        recipe, _, weighed = key.partition("+")
        types = [
            plan.target_type.name
            for plan in decide(drafts, IK_RECIPES[recipe], facts, bool(weighed), PlanOptions())
        ]
        ours = [[type_, len(list(run))] for type_, run in itertools.groupby(types)]
        assert ours == runs, key


def test_names_and_numbers_are_found_and_no_two_are_equal() -> None:
    assert len(set(FILE_TYPES)) == len(RECIPES) + len(ALIASES) + len(IK_RECIPES)
    numbers = [recipe.file_type for recipe in (*RECIPES.values(), *IK_RECIPES.values())]
    assert len(set(numbers)) == len(numbers)
    assert find_recipe("iq4_kss") is find_recipe("148") is IK_RECIPES["IQ4_KSS"]
    assert find_recipe("IQ2_XXS").program == "llama.cpp"
    with pytest.raises(BadRequest, match=r"unknown file type 'IQ4_KZ'; did you mean IQ4_K"):
        find_recipe("IQ4_KZ")


def test_embeddings_are_never_interleaved_and_the_reason_says_so() -> None:
    plan = plan_of(model("dense"), "IQ4_K_R4")
    embeddings = next(tensor for tensor in plan.tensors if tensor.name == "token_embd.weight")
    assert embeddings.target_type.name == "IQ4_K"
    assert embeddings.reason.endswith("; rows of embeddings can't be interleaved: IQ4_K_R4 -> IQ4_K")
    kept = Model((replace(embeddings.info, type=by_name("Q4_0_R8")),), model("dense").metadata)
    facts = ModelFacts.from_metadata(kept.metadata)
    assert types(build_plan(kept.tensors, RECIPES["COPY"], facts)) == {"token_embd.weight": "Q4_0_R8"}


def test_matrices_that_fill_no_group_get_the_base_type_and_it_is_told() -> None:
    plan = plan_of(model("rows that fill no group"), "IQ4_XS_R8")
    assert types(plan)["blk.9.ffn_down.weight"] == "IQ4_XS"
    texts = [finding.text for finding in plan.findings]
    expected = "IQ4_XS instead of IQ4_XS_R8, because 2 rows can't be cut into groups of 8: "
    assert any(text.startswith(expected) for text in texts)


def test_fallbacks_are_those_of_the_program_whose_file_type_it_is() -> None:
    chosen = model("latent attention")
    facts = ModelFacts.from_metadata(chosen.metadata)
    overrides = parse_overrides(["attn_k_b=Q5_K"])
    of_ik = types(plan_of(chosen, "IQ3_K", overrides=overrides))
    ours = types(build_plan(chosen.tensors, RECIPES["Q8_0"], facts, options=PlanOptions(overrides)))
    assert of_ik["blk.0.attn_k_b.weight"] == "Q6_0"
    assert ours["blk.0.attn_k_b.weight"] == "Q5_1"


def test_matrices_named_by_an_override_count_as_ik_llama_cpp_counts_them() -> None:
    """Three of 27 layers are the first eighth, with the one that the override names."""
    chosen, overrides = model("dense"), parse_overrides([r"blk\.1\.ffn_down=Q8_0"])
    got = types(plan_of(chosen, "IQ2_KS", overrides=overrides))
    down = [got[f"blk.{layer}.ffn_down.weight"] for layer in range(5)]
    assert down == ["Q2_K", "Q8_0", "Q2_K", "IQ2_KS", "IQ2_KS"]


def test_bits_low_enough_ask_for_importances() -> None:
    plan = plan_of(model("dense"), "IQ1_KT")
    lacking = [tensor.name for tensor in plan.tensors if tensor.lacks_data]
    assert "blk.0.ffn_up.weight" in lacking
    assert "output.weight" not in lacking
    assert not any(tensor.lacks_data for tensor in plan_of(model("dense"), "IQ3_K").tensors)
