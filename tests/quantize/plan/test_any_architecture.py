from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gguf_tools.errors import BadRequest, NoFallback
from gguf_tools.format.ggml_types import BF16, F32
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize.plan.model_facts import LAYERS_OF_70B, ModelFacts
from quantize.plan.plan import Plan, PlanOptions, build_plan
from quantize.plan.recipe import OWN_RULES
from quantize.plan.recipes import RECIPES
from quantize.roles import tensor_role
from tests.quantize.plan.any_architecture import (
    KEYS,
    MODELS,
    importances_for,
    metadata_of,
    plans_of,
    tensors_of,
)

REQUANTIZE = PlanOptions(allow_requantize=True)
LLAMA_70B = "llama-3.3-70b"


def plan_of(model: str, key: str, facts: ModelFacts | None = None) -> Plan:
    name, _, imatrix = key.partition("+")
    return build_plan(
        tensors_of(model),
        RECIPES[name],
        facts or ModelFacts.from_metadata(metadata_of(model)),
        importances=importances_for(model) if imatrix else None,
        options=REQUANTIZE,
        allow_problems=True,
    )


def types(plan: Plan) -> dict[str, str]:
    return {tensor.name: tensor.target_type.name for tensor in plan.tensors}


@pytest.mark.parametrize("model", MODELS)
def test_every_file_type_is_recorded(model: str) -> None:
    assert set(plans_of(model)) == set(KEYS)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("model", MODELS)
def test_plans_equal_the_recorded_ones(model: str, key: str) -> None:
    expected = plans_of(model)[key]
    if "refused" in expected:
        # An mmproj file does not say how many heads share a key: llama-quantize stops with an assertion.
        error = NoFallback if expected["refused"] == "no fallback type is defined" else BadRequest
        with pytest.raises(error) as refusal:
            plan_of(model, key)
        assert "\n" not in str(refusal.value)
        return
    plan = plan_of(model, key)
    assert types(plan) == expected["types"]
    assert plan.bits_per_weight == pytest.approx(expected["bpw"], abs=0.0051)
    assert plan.total_bytes / 2**20 == pytest.approx(expected["total_mib"], abs=0.0051)


@pytest.mark.parametrize("key", KEYS)
def test_qwen2_of_the_70b_class_gets_llamas_plan(key: str) -> None:
    facts = replace(ModelFacts.from_metadata(metadata_of(LLAMA_70B)), architecture="qwen2")
    assert types(plan_of(LLAMA_70B, key, facts)) == plans_of(LLAMA_70B)[key]["types"]


def values_under(recipe: str, facts: ModelFacts) -> str:
    """Return the type of an attn_v in the middle of a model."""
    tensors = [TensorInfo(f"blk.{i}.attn_v.weight", (1024, 8192), BF16) for i in range(facts.n_layers)]
    plan = build_plan(tensors, RECIPES[recipe], facts, allow_problems=True)
    return plan.tensors[facts.n_layers // 2].target_type.name


@pytest.mark.parametrize(("architecture", "n_layers"), LAYERS_OF_70B.items())
def test_the_70b_class_counts_no_layers_for_multi_token_prediction(architecture: str, n_layers: int) -> None:
    facts = ModelFacts(architecture, n_layers, n_heads=64, n_kv_heads=8)
    assert values_under("Q4_K_S", facts) == "Q5_K"
    assert values_under("Q4_K_S", replace(facts, n_layers=n_layers + 1)) == "Q4_K"
    assert values_under("Q4_K_S", replace(facts, n_layers=n_layers + 1, n_mtp_layers=1)) == "Q5_K"
    assert values_under("Q4_K_S", replace(facts, n_experts=8)) == "Q8_0"


def test_llama_65b_is_not_of_the_70b_class() -> None:
    assert values_under("Q4_K_S", ModelFacts("llama", 80, n_heads=64, n_kv_heads=64)) == "Q4_K"
    assert values_under("Q4_K_S", ModelFacts("qwen2", 80, n_heads=64, n_kv_heads=64)) == "Q5_K"


def test_only_what_the_heads_share_gets_more_bits_in_small_recipes() -> None:
    """A 70B model whose keys few heads share keeps the types below Q3_K and Q4_K."""
    facts = ModelFacts("qwen2", 80, n_heads=64, n_kv_heads=32)
    assert values_under("Q2_K", facts) == "Q5_K"
    assert values_under("Q2_K_S", facts) == "Q2_K"
    assert values_under("IQ3_XXS", facts) == "IQ3_S"
    assert values_under("IQ3_S", facts) == "IQ3_S"


def test_the_first_layers_heads_decide() -> None:
    metadata = {
        "general.architecture": Value.string("deci"),
        "deci.block_count": Value.u32(3),
        "deci.attention.head_count": Value.i32s([64, 0, 64]),
        "deci.attention.head_count_kv": Value.i32s([8, 0, 32]),
    }
    assert ModelFacts.from_metadata(metadata).n_gqa == 8
    metadata["deci.attention.head_count_kv"] = Value.i32s([0, 8, 8])
    assert ModelFacts.from_metadata(metadata).n_gqa == 0


def test_mmproj_files_need_no_number_of_layers() -> None:
    facts = ModelFacts.from_metadata({"general.architecture": Value.string("clip")})
    with pytest.raises(BadRequest, match="how many heads share a key, which clip files do not say"):
        _ = facts.n_gqa


@pytest.mark.parametrize(
    ("number", "found"),
    [({}, "missing from the metadata"), ({"llama.block_count": Value.string("two")}, "is string")],
)
def test_a_missing_number_of_layers_can_be_set(number: dict[str, Value], found: str) -> None:
    metadata = {"general.architecture": Value.string("llama"), **number}
    way = f"llama.block_count: {found}, expected the number of layers; kv_overrides llama.block_count=int:N"
    with pytest.raises(BadRequest, match=re.escape(way)):
        ModelFacts.from_metadata(metadata)
    assert ModelFacts.from_metadata(metadata, has_layers=False).n_layers == 0
    with pytest.raises(BadRequest, match=re.escape("kv_overrides general.architecture=str:NAME")):
        ModelFacts.from_metadata(number)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("blk.1.attn_k_b.weight", True), ("blk.1.attn_kv_a_mqa.weight", True),
        ("blk.1.ssm_beta.weight", True), ("blk.1.indexer.attn_q_b.weight", True),
        ("blk.1.hc_attn_fn.weight", True), ("blk.1.indexer_compressor_gate.weight", True),
        ("blk.1.attn_output.weight", False),
    ],
)  # fmt: skip
def test_what_only_glm5_next_keeps(name: str, kept: bool) -> None:
    assert (tensor_role(name, (256, 256), "glm5-next").kept_as is not None) is kept
    assert tensor_role(name, (256, 256), "deepseek2").kept_as is None


@pytest.mark.parametrize("recipe", ["Q2_K", "IQ1_S", "Q4_K_M", "MXFP4_MOE", "F16"])
def test_glm5_next_spares_its_low_rank_queries(recipe: str) -> None:
    names = ["blk.1.attn_q_a.weight", "blk.1.attn_q_b.weight", "blk.3.nextn.eh_proj.weight"]
    tensors = [TensorInfo(name, (256, 256), F32) for name in names]
    plan = build_plan(
        tensors, RECIPES[recipe], ModelFacts("glm5-next", 4, n_heads=8, n_kv_heads=1), allow_problems=True
    )
    assert set(types(plan).values()) == {"F16" if recipe == "F16" else "Q8_0"}


def test_own_rules_name_recipes_and_places() -> None:
    for row in OWN_RULES:
        assert set(row.recipes) <= set(RECIPES)
        assert row.source


@pytest.mark.parametrize(
    ("stored", "n_gqa"),
    [(Value.u32(4), 8), (Value.i32s([4, 4]), 2), (None, 1)],
    ids=["number", "array", "none"],
)
def test_an_override_of_heads_counts_only_in_the_place_of_a_number(stored: Value | None, n_gqa: int) -> None:
    """As in llama-quantize, which looks at the file's key before it asks for overrides."""
    key = "llama.attention.head_count_kv"
    metadata = {
        "general.architecture": Value.string("llama"),
        "llama.block_count": Value.u32(2),
        "llama.attention.head_count": Value.u32(8),
    }
    metadata |= {} if stored is None else {key: stored}
    facts = ModelFacts.from_metadata(metadata, [(key, Value.u32(1)), ("llama.expert_count", Value.u32(4))])
    assert (facts.n_gqa, facts.n_experts) == (n_gqa, 4)
