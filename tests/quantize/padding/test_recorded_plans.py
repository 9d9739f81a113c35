"""llama-quantize's recorded plans of real models, and ours for the same models padded.

What a tensor gets does not depend on the length of its rows until it falls back. So a padded tensor has the
type that llama-quantize fell back from, and any other tensor the recorded one.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from quantize.importances.entries import Importances
from quantize.padding.matrix import fit_importances
from quantize.padding.padding import paddings
from quantize.plan.fallback import fit
from quantize.plan.model_facts import ModelFacts
from quantize.plan.plan import PlanOptions, build_plan
from quantize.plan.recipes import RECIPES
from tests.quantize.plan import any_architecture, recorded_plans
from tests.quantize.plan.any_architecture import KEYS

MODELS = ("deepseek-moe-16b", "glm-4.5-air", "gpt-oss-20b", "v2-lite")
SIZES = {"feed_forward_length": 10944, "expert_feed_forward_length": 1408, "expert_shared_count": 2}


def model_of(name: str) -> tuple[Metadata, Sequence[TensorInfo], ModelFacts, Importances]:
    if name != "v2-lite":
        metadata = any_architecture.metadata_of(name)
        facts = ModelFacts.from_metadata(metadata)
        return metadata, any_architecture.tensors_of(name), facts, any_architecture.importances_for(name)
    metadata = {f"deepseek2.{key}": Value.u32(number) for key, number in SIZES.items()}
    metadata["general.architecture"] = Value.string("deepseek2")
    entries = recorded_plans.importances_for(name)
    return metadata, recorded_plans.tensors_of(name), recorded_plans.FACTS[name], entries


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("model", MODELS)
def test_a_padded_tensor_has_the_type_that_was_asked_for(model: str, key: str) -> None:
    if model == "v2-lite":
        recorded = recorded_plans.recorded("v2-lite.plans").get(key, {"refused": "not recorded"})
    else:
        recorded = any_architecture.plans_of(model)[key]
    if "refused" in recorded:
        pytest.skip("llama-quantize refuses it without padding")
    metadata, tensors, facts, entries = model_of(model)
    padding = paddings(metadata, tensors, model)[-1]
    assert padding.pads
    recipe, _, imatrix = key.partition("+")
    plan = build_plan(
        padding.infos(tensors),
        RECIPES[recipe],
        facts,
        importances=fit_importances(entries, padding.metadata(metadata), padding.infos(tensors))
        if imatrix
        else None,
        options=PlanOptions(allow_requantize=True),
        allow_problems=True,
    )
    old = {info.name: info for info in tensors}
    for tensor in plan.tensors:
        was = old[tensor.name]
        fitted = fit(tensor.target_type, was.n_cols, n_rows=was.n_rows // was.n_mats)
        assert fitted is not None
        assert recorded["types"][tensor.name].upper() == fitted.type.name, tensor.name
