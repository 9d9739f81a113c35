from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from gguf_tools.errors import BadImportance, BadOverride, BadRequest, NeedsImportance, NoFallback
from gguf_tools.findings import Level
from gguf_tools.format.ggml_types import BF16, F16, F32, I2_S, Q4_K, Q6_K, Q8_0, by_name
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize.importances.entries import Importance
from quantize.plan.converter_types import outtype_plan, resolve_outtype
from quantize.plan.findings import Kind, without_codec
from quantize.plan.model_facts import ModelFacts
from quantize.plan.overrides import parse_overrides
from quantize.plan.plan import Plan, PlanOptions, build_plan, in_file_order
from quantize.plan.recipes import RECIPES
from tests.quantize.plan.recorded_plans import FACTS, importances_for, recorded, tensors_of

REFUSED_WITHOUT = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "Q2_K_S"}
SMALL = ModelFacts("deepseek2", n_layers=3, n_experts=16, n_heads=4, n_kv_heads=1)


def types(plan: Plan) -> dict[str, str]:
    return {tensor.name: tensor.target_type.name for tensor in plan.tensors}


@pytest.mark.parametrize("model", ["v3", "v2-lite", "tiny-deepseek-v3"])
@pytest.mark.parametrize("key", recorded("v3.plans"))
def test_plans_equal_the_recorded_ones(model: str, key: str) -> None:
    name, _, imatrix = key.partition("+")
    plans = recorded(f"{model}.plans")
    if key not in plans:
        assert (model, name) in {("v2-lite", "Q1_0"), ("tiny-deepseek-v3", "F32")}
        return
    expected = plans[key]
    importances = importances_for(model) if imatrix else None
    plan = build_plan(
        tensors_of(model), RECIPES[name], FACTS[model], importances=importances, allow_problems=True
    )
    assert bool(plan.problems) == (not imatrix and name in REFUSED_WITHOUT)
    if "refused" in expected:
        assert plan.problems
        return
    assert types(plan) == expected["types"]
    if "bpw" in expected:
        assert plan.bits_per_weight == pytest.approx(expected["bpw"], abs=0.0051)
        assert plan.total_bytes / 2**20 == pytest.approx(expected["total_mib"], abs=0.0051)


def test_order_of_the_input_changes_no_type() -> None:
    tensors = tensors_of("v2-lite")
    for name in ("IQ2_XXS", "Q3_K_M"):
        one = build_plan(tensors, RECIPES[name], FACTS["v2-lite"], allow_problems=True)
        other = build_plan(tensors[::-1], RECIPES[name], FACTS["v2-lite"], allow_problems=True)
        assert types(one) == types(other)
        assert [t.name for t in other.tensors] == [t.name for t in tensors[::-1]]


MTP = ModelFacts("glm4moe", n_layers=5, n_heads=4, n_kv_heads=4, n_mtp_layers=2)


@pytest.mark.parametrize(
    ("lacking", "rule", "why"),
    [
        ({"blk.4."}, r"overrides 'blk\.4\.=Q4_K'", "; layer 4 is for multi-token prediction (MTP)"),
        ({"blk.3.", "blk.4."}, r"'blk\.(3|4)\.=Q4_K'", "; layers 3-4 are for multi-token prediction"),
        ({"blk.2."}, r"'blk\.2\.=Q4_K'", ""),
        ({"blk.1.attn_q", "blk.2.attn_q"}, r"'blk\.(1|2)\.attn_q\.weight$=Q4_K'", ""),
        ({"blk.0.ffn_up", "blk.0.attn_q"}, r"'blk\.0\.(attn_q\.weight|ffn_up\.weight)$=Q4_K'", ""),
    ],
)
def test_a_refusal_names_the_rule_that_helps(lacking: set[str], rule: str, why: str) -> None:
    names = [f"blk.{i}.{part}.weight" for i in range(5) for part in ("attn_q", "attn_output", "ffn_up")]
    tensors = [TensorInfo(name, (256, 256), BF16) for name in names]
    known = {
        name: Importance(np.ones((1, 256), np.float32), np.ones(1, np.float32))
        for name in names
        if not any(name.startswith(start) for start in lacking)
    }
    with pytest.raises(NeedsImportance) as needs:
        build_plan(tensors, RECIPES["IQ2_XXS"], MTP, importances=known)
    said = str(needs.value)
    assert rule in said
    assert why in said
    assert ("MTP" in said) == bool(why)
    rules = parse_overrides(re.findall(r"overrides '([^']*)'", said), must_match=True)
    options = PlanOptions(overrides=rules)
    plan = build_plan(tensors, RECIPES["IQ2_XXS"], MTP, importances=known, options=options)
    changed = {t.name for t in plan.tensors if t.target_type.name == "Q4_K"}
    assert changed == {name for name in names if name not in known}


def test_a_matrix_that_knows_nothing_may_be_another_model_s() -> None:
    tensors = [TensorInfo(f"blk.{i}.attn_q.weight", (256, 256), BF16) for i in range(5)]
    known = {"blk.9.attn_q.weight": Importance(np.ones((1, 256), np.float32), np.ones(1, np.float32))}
    with pytest.raises(NeedsImportance, match="was the matrix made for another model"):
        build_plan(tensors, RECIPES["IQ2_XXS"], MTP, importances=known)


def test_visits_are_counted_in_the_order_given_when_asked() -> None:
    facts = ModelFacts("deepseek2", n_layers=8, n_experts=16, n_heads=4, n_kv_heads=1)
    tensors = [TensorInfo(f"blk.{i}.ffn_down_exps.weight", (16, 4, 256), BF16) for i in reversed(range(8))]
    by_layer = build_plan(tensors, RECIPES["IQ2_XXS"], facts, allow_problems=True)
    as_given = build_plan(
        tensors, RECIPES["IQ2_XXS"], facts, options=PlanOptions(keep_order=True), allow_problems=True
    )
    assert [n for n, t in types(by_layer).items() if t == "Q2_K"] == ["blk.0.ffn_down_exps.weight"]
    assert [n for n, t in types(as_given).items() if t == "Q2_K"] == ["blk.7.ffn_down_exps.weight"]


def test_refusals_list_every_tensor() -> None:
    with pytest.raises(NeedsImportance) as needs:
        build_plan(tensors_of("v2-lite"), RECIPES["IQ2_XXS"], FACTS["v2-lite"])
    assert "pass one with importances" in str(needs.value)
    assert ": IQ2_XXS: blk.0-26.attn_" in str(needs.value)
    assert ", blk.0.ffn_gate.weight" in str(needs.value)
    assert ", blk.1-26.ffn_up_exps.weight" in str(needs.value)
    assert len(str(needs.value)) < 500
    with pytest.raises(NoFallback, match=r"known for blk\.0\.ffn_down\.weight \(Q1_0: row length 10944"):
        build_plan(tensors_of("v2-lite"), RECIPES["Q1_0"], FACTS["v2-lite"])


def test_a_tensor_without_data_is_refused_by_name() -> None:
    importances = dict(importances_for("tiny-deepseek-v3"))
    del importances["blk.2.ffn_up_exps.weight"]
    tensors, facts = tensors_of("tiny-deepseek-v3"), FACTS["tiny-deepseek-v3"]
    with pytest.raises(NeedsImportance, match=r"^1 of .* no data for them: IQ2_XXS: blk\.2\.ffn_up_exps"):
        build_plan(tensors, RECIPES["IQ2_XXS"], facts, importances=importances)
    plan = build_plan(tensors, RECIPES["Q4_K_M"], facts, importances=importances)
    assert "no data in the importance matrix: 1 of 35 tensors: blk.2.ffn_up_exps.weight" in plan.remarks


def test_nobody_is_warned_of_data_that_are_never_collected() -> None:
    importances = dict(importances_for("tiny-deepseek-v3"))
    tensors, facts = tensors_of("tiny-deepseek-v3"), FACTS["tiny-deepseek-v3"]
    rare = {"token_embd.weight", "output.weight"}
    for left_out, level in ((rare, Level.NOTE), (rare | {"blk.0.attn_q_a.weight"}, Level.WARNING)):
        known = {name: data for name, data in importances.items() if name not in left_out}
        known.setdefault("blk.2.ffn_up_exps.weight", importances["blk.2.ffn_up_exps.weight"])
        plan = build_plan(tensors, RECIPES["Q4_K_M"], facts, importances=known)
        (missed,) = [finding for finding in plan.findings if finding.kind == Kind.NO_DATA]
        assert (set(missed.about), missed.level) == (left_out, level)


def test_a_fallback_that_the_user_names_is_no_warning() -> None:
    """Nor is one of rows that are shorter than a block, which no file of that model can do without."""
    options = PlanOptions(fallbacks=parse_overrides(["blk.0.attn_q=Q8_0"]))
    tensors = [
        TensorInfo(name, (32, n_cols), F32)
        for name, n_cols in {
            "blk.0.attn_q.weight": 320, "blk.1.attn_q.weight": 320, "blk.2.attn_q.weight": 128,
        }.items()
    ]  # fmt: skip
    plan = build_plan(tensors, RECIPES["Q4_K_M"], SMALL, options=options)
    levels = {each.about[0]: each.level for each in plan.findings if each.kind == Kind.FALLBACK}
    assert levels == {
        "blk.0.attn_q.weight": Level.NOTE,
        "blk.1.attn_q.weight": Level.WARNING,
        "blk.2.attn_q.weight": Level.NOTE,
    }
    assert len(plan.remarks) - len(plan.warnings) == 2


def test_embeddings_and_output_do_without_data_unless_the_type_is_impossible() -> None:
    tensors = [TensorInfo("token_embd.weight", (32, 256), F32), TensorInfo("output.weight", (32, 256), F32)]
    plan = build_plan(tensors, RECIPES["Q2_K_S"], SMALL)
    assert types(plan)["token_embd.weight"] == "Q2_K"
    with pytest.raises(NeedsImportance, match="token_embd"):
        build_plan(tensors, RECIPES["Q8_0"], SMALL, options=PlanOptions(embedding_type=by_name("IQ2_XXS")))


def test_data_that_does_not_fit_stops_the_plan() -> None:
    tensors = [TensorInfo("blk.0.attn_output.weight", (8, 512), F32)]
    wrong = {"blk.0.attn_output.weight": Importance(np.ones((1, 500), np.float32), np.ones(1, np.float32))}
    with pytest.raises(BadImportance, match=r"have 500 values, expected 512 for shape 8 x 512"):
        build_plan(tensors, RECIPES["Q4_K_M"], SMALL, importances=wrong)
    assert types(build_plan(tensors, RECIPES["Q8_0"], SMALL, importances=wrong))  # Q8_0 looks at none


def test_quantized_input_needs_leave() -> None:
    names = {"blk.0.ffn_up.weight"}
    tensors = [replace(t, type=Q8_0) if t.name in names else t for t in tensors_of("v2-lite")]
    with pytest.raises(BadRequest, match=r"1 of 404 .* already: blk\.0\.ffn_up\.weight \(Q8_0 -> Q4_K\)"):
        build_plan(tensors, RECIPES["Q4_K_M"], FACTS["v2-lite"])
    assert build_plan(tensors, RECIPES["COPY"], FACTS["v2-lite"]).tensors
    build_plan(tensors, RECIPES["Q4_K_M"], FACTS["v2-lite"], options=PlanOptions(allow_requantize=True))


def test_copy_keeps_every_type() -> None:
    plan = build_plan(tensors_of("v3"), RECIPES["COPY"], FACTS["v3"])
    assert all(tensor.is_copied and tensor.reason == "COPY" for tensor in plan.tensors)


def test_bytes_behind_the_rows_are_not_lost_in_silence() -> None:
    tensors = [replace(t, type=I2_S) if "ffn_up" in t.name else t for t in tensors_of("tiny-deepseek-v3")]
    plan = build_plan(tensors, RECIPES["COPY"], FACTS["tiny-deepseek-v3"])
    (finding,) = without_codec(plan.tensors)
    assert finding.stops
    assert "blk.0.ffn_up.weight: I2_S has bytes after its rows and can't be copied" in finding.text


def test_options_of_llama_quantize() -> None:
    tensors, facts = tensors_of("tiny-deepseek-v3"), FACTS["tiny-deepseek-v3"]

    def with_options(options: PlanOptions, recipe: str = "Q4_K_M") -> dict[str, str]:
        return types(build_plan(tensors, RECIPES[recipe], facts, options=options))

    assert with_options(PlanOptions(leave_output=True))["output.weight"] == "F32"
    assert with_options(PlanOptions(output_type=Q8_0))["output.weight"] == "Q8_0"
    assert with_options(PlanOptions(output_type=Q8_0), "F16")["output.weight"] == "Q8_0"
    assert with_options(PlanOptions(embedding_type=F16))["token_embd.weight"] == "F16"
    pure = with_options(PlanOptions(pure=True))
    assert pure["output.weight"] == pure["blk.2.ffn_down_exps.weight"] == "Q4_K"
    assert pure["blk.0.attn_k_b.weight"] == "Q5_0"


def test_tied_embeddings_get_the_type_of_the_output() -> None:
    tensors = [TensorInfo("token_embd.weight", (32, 256), F32)]
    assert types(build_plan(tensors, RECIPES["Q4_K_M"], SMALL)) == {"token_embd.weight": "Q6_K"}
    plan = build_plan(tensors, RECIPES["Q4_K_M"], SMALL, options=PlanOptions(output_type=Q8_0))
    assert types(plan) == {"token_embd.weight": "Q8_0"}


def test_overrides_win_over_the_recipe_in_order() -> None:
    overrides = parse_overrides(["ffn_down_exps=Q8_0", "exps=IQ4_NL", "attn_k_b=Q6_K", "output=F16"])
    plan = build_plan(
        tensors_of("tiny-deepseek-v3"),
        RECIPES["Q4_K_M"],
        FACTS["tiny-deepseek-v3"],
        options=PlanOptions(overrides=overrides, output_type=Q6_K),
    )
    found = {tensor.name: tensor for tensor in plan.tensors}
    assert found["blk.2.ffn_down_exps.weight"].target_type == Q8_0
    assert found["blk.2.ffn_down_exps.weight"].reason == "override ffn_down_exps=Q8_0"
    assert found["blk.2.ffn_up_exps.weight"].target_type.name == "IQ4_NL"
    k_b = found["blk.0.attn_k_b.weight"]
    assert k_b.target_type == Q8_0
    assert k_b.reason == "override attn_k_b=Q6_K; row length 128 is no multiple of 256: Q6_K -> Q8_0"
    assert found["output.weight"].target_type == Q6_K  # the option goes first
    assert found["blk.0.attn_output.weight"].target_type == F16


def test_a_named_fallback_is_asked_only_when_rows_do_not_fit() -> None:
    def build(*fallbacks: str, overrides: tuple[str, ...] = ()) -> Plan:
        options = PlanOptions(overrides=parse_overrides(overrides), fallbacks=parse_overrides(fallbacks))
        tensors, facts = tensors_of("tiny-deepseek-v3"), FACTS["tiny-deepseek-v3"]
        return build_plan(tensors, RECIPES["Q4_K_M"], facts, options=options)

    plain, named = build(), build("blk.0.attn_k_b=Q8_0", "attn=F16")
    changed = {
        name: (old, types(named)[name]) for name, old in types(plain).items() if old != types(named)[name]
    }
    assert changed == {
        "blk.0.attn_k_b.weight": ("Q5_0", "Q8_0"),
        "blk.1.attn_k_b.weight": ("Q5_0", "F16"),
        "blk.2.attn_k_b.weight": ("Q5_0", "F16"),
    }
    first = next(tensor for tensor in named.tensors if tensor.fell_from is not None)
    assert first.fell_from == Q4_K
    assert first.reason == (
        "Q4_K_M: default; row length 128 is no multiple of 256: Q4_K -> Q8_0 (fallback blk.0.attn_k_b=Q8_0)"
    )
    # A type that fits, set by hand, needs no fallback; one that does not fit takes it.
    assert types(build("k_b=Q8_0", overrides=("attn_k_b=Q4_0",)))["blk.0.attn_k_b.weight"] == "Q4_0"
    assert types(build("k_b=Q8_0", overrides=("attn_k_b=Q6_K",)))["blk.0.attn_k_b.weight"] == "Q8_0"
    # The first that matches is the one, even where a later one would fit.
    with pytest.raises(BadOverride) as error:
        build("attn_k_b=Q6_K", "attn_k_b=Q8_0")
    assert str(error.value) == (
        "rows do not fit the fallback that is named for blk.0-2.attn_k_b.weight (Q4_K: row length 128 is no"
        " multiple of 256; fallback attn_k_b=Q6_K: no multiple of 256 either)"
    )


def test_a_named_fallback_helps_where_none_is_known() -> None:
    tensors, facts = tensors_of("v2-lite"), FACTS["v2-lite"]
    with pytest.raises(NoFallback, match="name one with fallbacks REGEX=TYPE"):
        build_plan(tensors, RECIPES["Q1_0"], facts)
    options = PlanOptions(fallbacks=parse_overrides(["ffn_down=Q4_0"]))
    plan = build_plan(tensors, RECIPES["Q1_0"], facts, options=options)
    assert types(plan)["blk.0.ffn_down.weight"] == "Q4_0"


def test_fallbacks_without_effect_are_reported() -> None:
    fallbacks = parse_overrides(["attn_k_b=Q8_0", "blk.1.*k_b=Q4_0", "ffn_down=Q4_0", "xyz=F16"])
    plan = build_plan(
        tensors_of("tiny-deepseek-v3"),
        RECIPES["Q4_K_M"],
        FACTS["tiny-deepseek-v3"],
        options=PlanOptions(fallbacks=fallbacks),
    )
    assert plan.remarks == (
        "fallback 'blk.1.*k_b=Q4_0' is shadowed by 'attn_k_b=Q8_0', which came first: blk.1.attn_k_b.weight",
        "fallback 'ffn_down=Q4_0' matches no tensor whose rows need one",
        "fallback 'xyz=F16' matches no tensor whose rows need one",
        "Q8_0 instead of Q4_K, because rows of 128 can't be cut into blocks of 256: 3 of 52 tensors:"
        " blk.0-2.attn_k_b.weight",
    )


def test_a_plan_with_problems_lists_them_all() -> None:
    tensors = [
        TensorInfo("blk.0.attn_output.weight", (8, 512), F32),
        TensorInfo("blk.0.ffn_up.weight", (8, 512), Q8_0),
        TensorInfo("blk.1.ffn_up.weight", (8, 512), F32),
    ]
    wrong = {"blk.0.attn_output.weight": Importance(np.ones((1, 500), np.float32), np.ones(1, np.float32))}
    plan = build_plan(tensors, RECIPES["IQ2_XS"], SMALL, importances=wrong, allow_problems=True)
    assert [(problem.error, problem.tensors) for problem in plan.problems] == [
        (BadImportance, ("blk.0.attn_output.weight",)),
        (BadRequest, ("blk.0.ffn_up.weight",)),
        (NeedsImportance, ("blk.0.ffn_up.weight", "blk.1.ffn_up.weight")),
    ]
    assert json.loads(json.dumps(plan.to_json()))["problems"] == [problem.text for problem in plan.problems]


def test_overridden_tensors_are_not_counted_as_visited() -> None:
    """llama-quantize counts inside its rules, which overridden tensors never reach."""
    facts = ModelFacts("deepseek2", n_layers=16, n_experts=16, n_heads=4, n_kv_heads=1)
    tensors = [TensorInfo(f"blk.{i}.ffn_down_exps.weight", (16, 4, 256), BF16) for i in range(16)]
    plan = build_plan(
        tensors,
        RECIPES["IQ2_XXS"],
        facts,
        options=PlanOptions(overrides=parse_overrides([r"blk\.0\.=Q8_0"])),
        allow_problems=True,
    )
    assert [n.split(".")[1] for n, t in types(plan).items() if t == "Q2_K"] == ["1", "2"]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("ffn_dwn_exps=Q8_0", "overrides 'ffn_dwn_exps=Q8_0' matches no .*; did you mean ffn_down_exps?"),
        (r"blk\.[0-3]\.atn_output=Q8_0", "matches no tensor; did you mean attn_output?"),
        ("xyz=Q8_0", "overrides 'xyz=Q8_0' matches no tensor$"),
        ("attn_norm=Q8_0", None),  # a tensor that stays as it is: a note, as ever
    ],
)
def test_a_mistyped_override_stops_a_run(rule: str, message: str | None) -> None:
    options = PlanOptions(overrides=parse_overrides([rule], must_match=True))
    args = tensors_of("tiny-deepseek-v3"), RECIPES["Q4_K_M"], FACTS["tiny-deepseek-v3"]
    if message is None:
        assert "matches no tensor that can be quantized" in build_plan(*args, options=options).remarks[0]
        return
    with pytest.raises(BadOverride, match=message.replace("?", r"\?").replace("(", r"\(")):
        build_plan(*args, options=options)
    plan = build_plan(*args, options=options, allow_problems=True)
    assert len(plan.problems) == 1


def test_overrides_without_effect_are_reported() -> None:
    overrides = parse_overrides(["ffn=Q8_0", "ffn_up=Q4_0", "attn_norm=Q8_0", "nothing_here=Q4_0"])
    notes = build_plan(
        tensors_of("tiny-deepseek-v3"),
        RECIPES["Q4_K_M"],
        FACTS["tiny-deepseek-v3"],
        options=PlanOptions(overrides=overrides),
    ).remarks
    assert any("'ffn_up=Q4_0' is shadowed" in note and "'ffn=Q8_0'" in note for note in notes)
    assert "override 'attn_norm=Q8_0' matches no tensor that can be quantized" in notes
    assert "override 'nothing_here=Q4_0' matches no tensor that can be quantized" in notes
    notes = build_plan(
        tensors_of("tiny-deepseek-v3"),
        RECIPES["F16"],
        FACTS["tiny-deepseek-v3"],
        options=PlanOptions(overrides=overrides),
    ).remarks
    assert notes == ("overrides have no effect under F16",)


def test_pruned_layers_close_the_gap_and_keep_their_importances() -> None:
    plan = build_plan(
        tensors_of("tiny-deepseek-v3"),
        RECIPES["Q4_K_M"],
        FACTS["tiny-deepseek-v3"],
        importances=importances_for("tiny-deepseek-v3"),
        options=PlanOptions(prune_layers=(1,)),
    )
    found = {tensor.name: tensor for tensor in plan.tensors}
    assert {t.name.split(".")[1] for t in plan.tensors if t.name.startswith("blk.")} == {"0", "1"}
    moved = found["blk.1.ffn_up_exps.weight"]
    assert moved.source_name == moved.entry == "blk.2.ffn_up_exps.weight"
    for pruned in ((3,), (0, 1, 2)):
        with pytest.raises(BadRequest, match="can't prune"):
            build_plan(
                tensors_of("tiny-deepseek-v3"),
                RECIPES["Q4_K_M"],
                SMALL,
                options=PlanOptions(prune_layers=pruned),
            )


def test_importance_notes() -> None:
    tensors = [
        TensorInfo("blk.0.attn_v_b.weight", (4, 128, 256), F32),
        TensorInfo("blk.0.attn_k_b.weight", (4, 256, 128), F32),
        TensorInfo("blk.1.ffn_up_exps.weight", (16, 64, 256), F32),
    ]
    seen = np.ones(16, np.float32)
    seen[[3, 7]] = 0
    importances = {
        "blk.0.attn_kv_b.weight": Importance(np.ones((1, 256), np.float32), np.ones(1, np.float32)),
        "blk.0.attn_k_b.weight": Importance(np.ones((1, 128), np.float32), np.ones(1, np.float32)),
        "blk.1.ffn_up_exps.weight": Importance(np.ones((16, 256), np.float32), seen),
        "blk.9.attn_q.weight": Importance(np.ones((1, 256), np.float32), np.ones(1, np.float32)),
    }
    plan = build_plan(tensors, RECIPES["Q4_K_M"], SMALL, importances=importances)
    assert [t.n_neutral for t in plan.tensors] == [0, 0, 2]
    notes = "\n".join(plan.remarks)
    assert "another tensor's importances: 1 of 3 tensors: blk.0.attn_v_b.weight (from blk.0" in notes
    assert "one row of importances for all matrices: 1 of 3 tensors: blk.0.attn_k_b.weight" in notes
    assert "routed to it: 1 of 3 tensors: blk.1.ffn_up_exps.weight (matrices: 2)" in notes
    assert "importances that belong to no tensor: 1 of 4 entries: blk.9.attn_q.weight" in notes


def test_json() -> None:
    plan = build_plan(tensors_of("v2-lite"), RECIPES["Q4_K_M"], FACTS["v2-lite"])
    data = json.loads(json.dumps(plan.to_json(total_bytes=123)))
    assert data["total_bytes"] == 123
    first = data["tensors"][0]
    assert {k: first[k] for k in ("name", "shape", "from", "to", "reason")} == {
        "name": "output.weight",
        "shape": [102400, 2048],
        "from": "BF16",
        "to": "Q6_K",
        "reason": "Q4_K_M: output",
    }


def test_a_strange_layer_is_refused() -> None:
    tensors = [TensorInfo("blk.9.ffn_down_exps.weight", (16, 4, 256), F32)]
    with pytest.raises(BadRequest, match=r"expected a name blk\.N\. with N below 3"):
        build_plan(tensors, RECIPES["Q4_K_M"], SMALL)


def test_facts_from_metadata() -> None:
    metadata = {
        "general.architecture": Value.string("deepseek2"),
        "deepseek2.block_count": Value.u32(27),
        "deepseek2.attention.head_count": Value.u32(16),
        "deepseek2.attention.head_count_kv": Value.u32(1),
        "deepseek2.expert_count": Value.u32(64),
    }
    assert ModelFacts.from_metadata(metadata) == FACTS["v2-lite"]
    del metadata["deepseek2.attention.head_count_kv"]
    assert ModelFacts.from_metadata(metadata).n_gqa == 1
    for key in ("deepseek2.block_count", "general.architecture"):
        del metadata[key]
        with pytest.raises(BadRequest, match=key):
            ModelFacts.from_metadata(metadata)


@pytest.mark.parametrize("model", ["tiny-deepseek-v2", "tiny-deepseek-v3"])
@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
def test_outtypes_equal_the_recorded_ones(model: str, outtype: str) -> None:
    expected = recorded("converted.outtypes")[model][outtype]
    tensors = [TensorInfo(name, tuple(shape), BF16) for name, (_, shape) in expected.items()]
    plan = outtype_plan(tensors, resolve_outtype(outtype, tensors))
    assert types(plan) == {name: type_ for name, (type_, _) in expected.items()}
    assert plan.file_type in RECIPES


def test_outtype_auto_and_fallback() -> None:
    stored = [TensorInfo("a", (4,), F32), TensorInfo("b", (2, 4), F32), TensorInfo("c", (2, 4), BF16)]
    assert resolve_outtype("auto", stored) == BF16
    assert resolve_outtype("auto", stored[:2]) == F16
    with pytest.raises(BadRequest, match="'q4_k': unknown output type"):
        resolve_outtype("q4_k", stored)
    plan = outtype_plan([TensorInfo("blk.0.attn_q.weight", (8, 100), F32)], Q8_0)
    assert types(plan) == {"blk.0.attn_q.weight": "F16"}
    assert plan.tensors[0].reason == "row length 100 is no multiple of 32: Q8_0 -> F16"
    assert plan.remarks == (
        "F16 instead of Q8_0, because rows of 100 can't be cut into blocks of 32: 1 of 1 tensors: blk.0"
        ".attn_q.weight",
    )


def test_in_file_order() -> None:
    tensors = [TensorInfo(n, (1,), Q4_K) for n in ("blk.10.a", "blk.9.b", "blk.9.a", "z")]
    assert [t.name for t in in_file_order(tensors)] == ["z", "blk.9.a", "blk.9.b", "blk.10.a"]
