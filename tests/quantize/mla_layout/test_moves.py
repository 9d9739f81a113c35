"""By which moves tensors are made, which types they get, and in which order they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gguf_tools.errors import BadOverride
from gguf_tools.format.ggml_types import BF16, F16, F32, Q4_0, Q4_K, Q5_0, Q8_0
from gguf_tools.format.tensors import TensorInfo
from quantize.mla_layout.layouts import HeadSizes, tensors_by_layer
from quantize.mla_layout.moves import How, plan_moves
from quantize.plan.overrides import parse_overrides
from quantize.roles import MLALayout
from tests.quantize.mla_layout.models import KV, SIZES, K, V, infos_of

PATH = Path("model.gguf")


def moves_of(found: MLALayout, wanted: MLALayout, type_: Any, *rules: str) -> dict[str, Any]:
    infos = infos_of(found, type_, n_layers=1)
    moves = plan_moves(infos, tensors_by_layer(infos, SIZES, PATH), wanted, SIZES, parse_overrides(rules))
    return {move.info.name.split(".")[2]: (move.how, move.info.type.name, move.is_exact) for move in moves}


QUANTIZED = {KV: Q4_K, K: Q5_0, V: Q4_K}


@pytest.mark.parametrize(
    ("found", "wanted", "type_", "expected"),
    [
        ("both", "split", QUANTIZED, {"attn_k_b": (How.RESHAPED, "Q5_0", True),
                                      "attn_v_b": (How.RESHAPED, "Q4_K", True)}),
        ("both", "none", QUANTIZED, {"attn_kv_b": (How.KEPT, "Q4_K", True)}),
        ("none", "split", QUANTIZED, {"attn_k_b": (How.KEY_ROWS, "Q8_0", False),
                                      "attn_v_b": (How.VALUE_ROWS, "Q4_K", True)}),
        ("none", "both", QUANTIZED, {"attn_kv_b": (How.KEPT, "Q4_K", True),
                                     "attn_k_b": (How.KEY_ROWS, "Q8_0", False),
                                     "attn_v_b": (How.VALUE_ROWS, "Q4_K", True)}),
        ("split", "both", QUANTIZED, {"attn_kv_b": (How.JOINED, "Q8_0", False),
                                      "attn_k_b": (How.RESHAPED, "Q5_0", True),
                                      "attn_v_b": (How.RESHAPED, "Q4_K", True)}),
        ("split", "none", QUANTIZED, {"attn_kv_b": (How.JOINED, "Q8_0", False)}),
        ("split", "none", BF16, {"attn_kv_b": (How.JOINED, "BF16", True)}),
        ("split", "none", {K: F16, V: BF16}, {"attn_kv_b": (How.JOINED, "F32", True)}),
        ("none", "split", F16, {"attn_k_b": (How.KEY_ROWS, "F16", True),
                                "attn_v_b": (How.VALUE_ROWS, "F16", True)}),
    ],
)  # fmt: skip
def test_moves_and_types(found: MLALayout, wanted: MLALayout, type_: Any, expected: dict) -> None:
    assert moves_of(found, wanted, type_) == expected


def test_types_by_hand_are_for_what_is_made() -> None:
    rules = ("attn_k_b=Q4_0", "attn_v_b=Q6_K")
    assert moves_of("none", "split", Q4_K, *rules) == {
        "attn_k_b": (How.KEY_ROWS, "Q4_0", False),
        "attn_v_b": (How.VALUE_ROWS, "Q6_K", False),
    }
    assert moves_of("both", "split", QUANTIZED, *rules)["attn_k_b"] == (How.RESHAPED, "Q5_0", True)


def test_rows_that_q8_0_does_not_fit_become_f16() -> None:
    sizes = HeadSizes(n_heads=2, nope=48, rope=16, value=32, kv_lora=64)
    infos = [TensorInfo("blk.0.attn_kv_b.weight", (160, 64), Q4_0)]
    moves = plan_moves(infos, tensors_by_layer(infos, sizes, PATH), "split", sizes)
    assert [move.info.type for move in moves] == [F16, Q4_0]


def test_a_type_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BadOverride, match=r"'k_b=Q4_K': blk.0.attn_k_b.weight has rows of 32.*instance Q8_0"):
        moves_of("none", "split", Q8_0, "k_b=Q4_K")


def test_order_is_the_converters_in_place_or_the_quantizers_by_name() -> None:
    def order(names: list[str], wanted: MLALayout) -> list[str]:
        by_name = {info.name: info for info in infos_of("split", n_layers=1)}
        infos = [by_name.get(f"blk.0.{n}.weight", TensorInfo(f"blk.0.{n}.weight", (8,), F32)) for n in names]
        moves = plan_moves(infos, tensors_by_layer(infos, SIZES, PATH), wanted, SIZES)
        return [move.info.name.split(".")[2] for move in moves]

    as_converted = ["attn_norm", "attn_k_b", "attn_v_b", "attn_output"]
    assert order(as_converted, "both") == ["attn_norm", "attn_kv_b", "attn_k_b", "attn_v_b", "attn_output"]
    assert order(as_converted, "none") == ["attn_norm", "attn_kv_b", "attn_output"]
    by_name = ["attn_k_b", "attn_norm", "attn_output", "attn_v_b"]
    assert order(by_name, "both") == ["attn_k_b", "attn_kv_b", "attn_norm", "attn_output", "attn_v_b"]
    assert order(by_name, "none") == ["attn_kv_b", "attn_norm", "attn_output"]
