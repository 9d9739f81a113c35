from __future__ import annotations

import random

import pytest

from quantize.roles import (
    Role,
    file_order,
    float32_reason,
    in_layer,
    in_layer_ranges,
    layer_of,
    n_dims,
    siblings_with_same_activations,
    tensor_role,
)
from tests.quantize.plan.recorded_plans import recorded, tensors_of

MATRIX = (8, 256)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("output.weight", Role.OUTPUT),
        ("output_norm.weight", Role.OTHER),
        ("token_embd.weight", Role.TOKEN_EMBD),
        ("blk.0.attn_q.weight", Role.ATTN_Q),
        ("blk.0.attn_q_a.weight", Role.OTHER),
        ("blk.0.attn_kv_a_mqa.weight", Role.OTHER),
        ("blk.0.attn_kv_b.weight", Role.ATTN_KV_B),
        ("blk.0.attn_k_b.weight", Role.ATTN_K_B),
        ("blk.0.attn_v_b.weight", Role.ATTN_V_B),
        ("blk.0.attn_output.weight", Role.ATTN_OUTPUT),
        ("blk.60.ffn_down.weight", Role.FFN_DOWN),
        ("blk.60.ffn_down_exps.weight", Role.FFN_DOWN),
        ("blk.60.ffn_gate_shexp.weight", Role.FFN_GATE),
        ("blk.60.ffn_up_exps.weight", Role.FFN_UP),
    ],
)
def test_role(name: str, role: Role) -> None:
    found = tensor_role(name, MATRIX)
    assert found.role is role
    assert found.layer == layer_of(name)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("blk.0.attn_norm.weight", (256,), "1-D"),
        ("blk.0.attn_q.weight", (1, 256), "1-D"),
        ("blk.0.attn_norm.weight", MATRIX, "norm"),
        ("blk.3.ffn_gate_inp.weight", MATRIX, "expert router"),
        ("blk.3.exp_probs_b.bias", MATRIX, "not a weight"),
        ("blk.3.ffn_gate_exps.weight", (4, 8, 256), None),
    ],
)
def test_what_is_never_quantized(name: str, shape: tuple[int, ...], reason: str | None) -> None:
    assert tensor_role(name, shape).kept_as == reason


def test_dimensions_count_as_in_ggml() -> None:
    shapes: list[tuple[int, ...]] = [(), (1,), (5,), (1, 5), (5, 1), (2, 1, 5), (1, 2, 5)]
    assert [n_dims(shape) for shape in shapes] == [1, 1, 1, 1, 2, 3, 2]


def test_layer_of() -> None:
    assert layer_of("blk.12.attn_q.weight") == 12
    assert layer_of("token_embd.weight") is None
    assert layer_of("v.blk.3.attn_q.weight") is None
    assert in_layer("blk.12.attn_q.weight", 7) == "blk.7.attn_q.weight"


@pytest.mark.parametrize("model", ["v3", "v2-lite", "tiny-deepseek-v3"])
def test_file_order_is_that_of_llama_quantize(model: str) -> None:
    names = [tensor.name for tensor in tensors_of(model)]
    random.Random(0).shuffle(names)
    assert file_order(names) == list(recorded(f"{model}.plans")["Q4_K_M"]["types"])


@pytest.mark.parametrize(
    ("merged", "parts"),
    [
        ("attn_kv_b", ("attn_v_b",)),
        ("attn_qkv", ("attn_q", "attn_k", "attn_v")),
        ("ffn_gate_up", ("ffn_gate", "ffn_up")),
        ("ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps")),
        ("ffn_gate_up_shexp", ("ffn_gate_shexp", "ffn_up_shexp")),
    ],
)
def test_siblings(merged: str, parts: tuple[str, ...]) -> None:
    whole, names = f"blk.1.{merged}.weight", tuple(f"blk.1.{part}.weight" for part in parts)
    assert siblings_with_same_activations(whole) == names
    assert all(siblings_with_same_activations(name) == (whole,) for name in names)


def test_others_have_no_siblings() -> None:
    for name in ("blk.1.attn_k_b.weight", "blk.1.attn_q.bias", "blk.1.ffn_down_exps.weight", "output.weight"):
        assert siblings_with_same_activations(name) == ()


def test_what_the_converter_keeps_in_float32() -> None:
    assert float32_reason("blk.0.attn_norm.weight", (256,)) == "1-D"
    assert float32_reason("blk.0.attn_q.weight", (1, 256)) is None
    assert float32_reason("blk.3.ffn_gate_inp.weight", MATRIX) == "expert router"


def test_layers_are_named_in_short() -> None:
    names = [*(f"blk.{i}.a" for i in (5, 0, 1, 2, 7, 8)), "output.weight", "blk.3.b", "{}"]
    assert in_layer_ranges(names) == ["blk.0-2,5,7-8.a", "output.weight", "blk.3.b", "{}"]
    assert in_layer_ranges([]) == []


@pytest.mark.parametrize("part", ["ssm_x", "ssm_dt"])
def test_ik_llama_cpp_keeps_more_of_mamba(part: str) -> None:
    name, shape = f"blk.0.{part}.weight", (64, 256)
    assert tensor_role(name, shape, "mamba").kept_as is None
    assert tensor_role(name, shape, "mamba", "ik_llama.cpp").kept_as == "small matrix of Mamba"
