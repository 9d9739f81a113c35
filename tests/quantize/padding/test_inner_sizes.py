"""Which sizes a model has, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gguf_tools.errors import BadRequest
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Kind, Value
from quantize.padding.inner_sizes import UNPADDED, inner_sizes
from quantize.padding.padding import paddings
from quantize.padding.resized import Extent, Resize
from tests.quantize.padding.ffn_files import KEY, METADATA, SHAPES, infos


def test_sizes_of_deepseek2() -> None:
    dense, routed = inner_sizes(METADATA, infos(), "m")
    assert (dense.key, routed.key) == ("deepseek2.feed_forward_length", KEY)
    assert {tensor.place.part for tensor in dense.tensors} == {"dense"}
    assert {tensor.place.part for tensor in routed.tensors} == {"routed", "shared"}
    assert [size.aligned().data for size in (dense, routed)] == [256, 256]
    assert dict(routed.resized(Value.u32(256))) == {
        "blk.1.ffn_gate_exps.weight": Resize(rows=Extent(96, 256)),
        "blk.1.ffn_up_exps.weight": Resize(rows=Extent(96, 256)),
        "blk.1.ffn_down_exps.weight": Resize(cols=Extent(96, 256)),
        "blk.1.ffn_gate_shexp.weight": Resize(rows=Extent(192, 512)),
        "blk.1.ffn_up_shexp.weight": Resize(rows=Extent(192, 512)),
        "blk.1.ffn_down_shexp.weight": Resize(cols=Extent(192, 512)),
    }


def one_layer(architecture: str, shapes: Mapping[str, tuple[int, ...]], **sizes: Value):
    metadata = {"general.architecture": Value.string(architecture)}
    metadata |= {f"{architecture}.{key}": value for key, value in sizes.items()}
    return inner_sizes(metadata, [TensorInfo(f"blk.0.{name}", s, F32) for name, s in shapes.items()], "m")


def test_shared_experts_alone_need_half_the_padding() -> None:
    down = {"ffn_down_shexp.weight": (64, 1408 * 2)}
    number = Value.u32(1408)
    (size,) = one_layer("glm4moe", down, expert_feed_forward_length=number, expert_shared_count=Value.u32(2))
    assert size.aligned() == number


def test_gate_and_up_in_one_have_two_runs() -> None:
    shapes = {"ffn_gate_up_exps.weight": (4, 1408, 64), "ffn_down_exps.weight": (4, 64, 704)}
    (size,) = one_layer("gemma4", shapes, expert_feed_forward_length=Value.u32(704))
    assert dict(size.resized(size.aligned()))["blk.0.ffn_gate_up_exps.weight"].shape((4, 1408, 64)) == (
        4,
        1536,
        64,
    )
    (size,) = one_layer("phi3", {"ffn_up.weight": (320, 64)}, feed_forward_length=Value.u32(160))
    assert dict(size.resized(size.aligned()))["blk.0.ffn_up.weight"] == Resize(rows=Extent(160, 256))


@pytest.mark.parametrize("name", ["ffn_res_score", "ffn_routed_down", "ffn_latent_up", "ffn_post_norm"])
def test_matrices_of_hidden_states_alone_stay(name: str) -> None:
    """Kimi K3 scores states, and its routed experts have a width of their own; Nemotron's, too."""
    shapes = {"ffn_down.weight": (64, 160), f"{name}.weight": (1, 64)}
    (size,) = one_layer("kimi-k3", shapes, feed_forward_length=Value.u32(160))
    assert dict(size.resized(size.aligned())) == {"blk.0.ffn_down.weight": Resize(cols=Extent(160, 256))}


def test_a_key_that_says_the_same_goes_along() -> None:
    """llama.cpp's minimax-m2 takes the size of its experts from feed_forward_length, and wants both keys."""
    number, names = Value.u32(96), ("feed_forward_length", "expert_feed_forward_length")
    keys = [f"minimax-m2.{name}" for name in names]
    metadata = {"general.architecture": Value.string("minimax-m2"), **dict.fromkeys(keys, number)}
    tensors = [TensorInfo("blk.0.ffn_down_exps.weight", (4, 64, 96), F32)]
    padding = paddings(metadata, tensors, "m")[-1]
    changed = padding.metadata(metadata)
    assert [changed[key].data for key in keys] == [256, 256]
    assert paddings(changed, padding.infos(tensors), "m")[0].metadata(changed) == metadata


def test_layers_may_differ() -> None:
    value = Value.array(Kind.INT32, [160, 512])
    metadata = {"general.architecture": Value.string("qwen2"), "qwen2.feed_forward_length": value}
    tensors = [TensorInfo(f"blk.{i}.ffn_down.weight", (64, n), F32) for i, n in enumerate((160, 512))]
    (size,) = inner_sizes(metadata, tensors, "m")
    assert size.aligned() == Value.array(Kind.INT32, [256, 512])
    assert dict(size.resized(size.aligned())) == {"blk.0.ffn_down.weight": Resize(cols=Extent(160, 256))}


def test_biases_on_the_inner_size() -> None:
    shapes = {"ffn_up_exps.bias": (4, 96), "ffn_down_exps.bias": (4, 64), "ffn_down_exps.weight": (4, 64, 96)}
    (size,) = one_layer("gpt-oss", shapes, expert_feed_forward_length=Value.u32(96))
    resized = dict(size.resized(size.aligned()))
    assert resized["blk.0.ffn_up_exps.bias"] == Resize(cols=Extent(96, 256))
    assert "blk.0.ffn_down_exps.bias" not in resized


REFUSED = {
    "another architecture": ({"general.architecture": Value.string("rwkv7")}, {}, "rwkv7"),
    "no size": ({KEY: None}, {}, f"{KEY} is missing"),
    "no count": ({"deepseek2.expert_shared_count": None}, {}, "expert_shared_count is missing"),
    "a size of another kind": ({KEY: Value.string("96")}, {}, KEY),
    "a size that contradicts": ({KEY: Value.u32(95)}, {}, "96 rows, expected 95"),
    "too short an array": ({KEY: Value.u32s([96])}, {}, f"{KEY} is"),
    "one matrix of another size": ({}, {"blk.1.ffn_down_exps.weight": (3, 256, 90)}, "expected 96"),
    "a norm on the inner size": ({}, {"blk.0.ffn_sub_norm.weight": (160,)}, "ffn_sub_norm"),
    "an activation's scale": ({}, {"blk.0.ffn_act.scales": (160,)}, "ffn_act.scales"),
    "padded to less": ({UNPADDED + KEY: Value.u32(97)}, {}, "expected no more than"),
    "padded from another kind": ({UNPADDED + KEY: Value.u32s([9, 9])}, {}, "expected no more than"),
    "fused with another size": ({}, {"blk.1.ffn_gate_up_exps.weight": (3, 96, 256)}, "expected 192"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    changed, shapes, message = REFUSED[case]
    metadata = {key: value for key, value in (METADATA | changed).items() if value is not None}
    with pytest.raises(BadRequest, match=message) as error:
        inner_sizes(metadata, infos({**SHAPES, **shapes}), "model.gguf")
    assert "\n" not in str(error.value)
