"""Plans equal llama-quantize's for layouts other than 3-D attention heads with an output matrix."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from quantize.importances.entries import Importance
from quantize.plan.plan import build_plan
from quantize.plan.recipes import RECIPES
from tests.quantize.plan.layouts import LAYOUTS, Layout
from tests.quantize.plan.recorded_plans import recorded

RECORDED: dict[str, dict[str, Any]] = recorded("layouts.plans")["plans"]


def importances_of(layout: Layout) -> dict[str, Importance]:
    one = np.float32(1)
    return {
        tensor.name: Importance(
            np.broadcast_to(one, (tensor.n_mats, tensor.n_cols)), np.broadcast_to(one, tensor.n_mats)
        )
        for tensor in layout.tensors
    }


def test_every_layout_is_recorded_for_every_file_type() -> None:
    assert set(RECORDED) == set(LAYOUTS)
    keys = {recipe + suffix for recipe in RECIPES for suffix in ("", "+imatrix")}
    assert all(set(plans) == keys for plans in RECORDED.values())


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("file_type", RECIPES)
@pytest.mark.parametrize("suffix", ["", "+imatrix"])
def test_plans_equal_the_recorded_ones(name: str, file_type: str, suffix: str) -> None:
    layout = LAYOUTS[name]
    importances = importances_of(layout) if suffix else None
    plan = build_plan(
        layout.tensors, RECIPES[file_type], layout.facts, importances=importances, allow_problems=True
    )
    types = (tensor.target_type.name for tensor in plan.tensors)
    runs = [[type_, len(list(run))] for type_, run in itertools.groupby(types)]
    assert runs == RECORDED[name][file_type + suffix]
