"""Which tensors and keys a layout has, and how it is recognised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gguf_tools.errors import BadRequest
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from gguf_tools.look.listing import count_parameters
from quantize.mla_layout.layouts import (
    LAYOUTS,
    HeadSizes,
    layout_of,
    metadata_in,
    relabelled,
    tensor_name,
    tensors_by_layer,
)
from quantize.roles import MLALayout, Role
from tests.quantize.mla_layout.models import SIZES, K, V, infos_of, keys_of

PATH = Path("model.gguf")


def test_sizes_are_the_same_from_every_layout() -> None:
    assert {HeadSizes.from_metadata(keys_of(layout), PATH) for layout in LAYOUTS} == {SIZES}


def test_one_number_a_layer_is_a_number() -> None:
    metadata = keys_of("none", attention__head_count=Value.u32s([3, 3]))
    assert HeadSizes.from_metadata(metadata, PATH) == SIZES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention__kv_lora_rank": None}, r"model.gguf: deepseek2.attention.kv_lora_rank is missing"),
        ({"attention__key_length": None}, r"key_length is missing, expected a positive whole number"),
        ({"attention__key_length": Value.u32(16)}, r"key has 16 elements and rope.dimension_count is 16"),
        ({"attention__head_count": Value.u32s([3, 4])}, r"head_count is \[3, 4\], expected"),
        ({"attention__value_length": Value.string("x")}, r"value_length is 'x', expected"),
        ({"attention__value_length": Value.u32(0)}, r"value_length is 0, expected"),
    ],
)
def test_metadata_that_make_no_sense_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        HeadSizes.from_metadata(keys_of("none", **changes), PATH)


@pytest.mark.parametrize("metadata", [{}, {"general.architecture": Value.string("llama")}])
def test_another_architecture_is_refused(metadata: dict[str, Value]) -> None:
    with pytest.raises(BadRequest, match=r"general.architecture is (missing|'llama'), expected deepseek2"):
        HeadSizes.from_metadata(metadata, PATH)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_recognised_and_a_mixture_is_none(layout: MLALayout) -> None:
    infos = infos_of(layout)
    assert layout_of(tensors_by_layer(infos, SIZES, PATH), SIZES) == layout
    other = LAYOUTS[LAYOUTS.index(layout) - 1]
    mixed = [*infos, *(TensorInfo(i.name.replace("blk.", "blk.1"), i.shape, F32) for i in infos_of(other))]
    assert layout_of(tensors_by_layer(mixed, SIZES, PATH), SIZES) is None


def test_a_shape_that_the_metadata_contradict_is_named() -> None:
    wrong = TensorInfo("blk.0.attn_k_b.weight", (3, 256, 16), F32)
    with pytest.raises(BadRequest, match=r"k_b.weight has shape 3 x 256 x 16, expected 3 heads of 256 x 32"):
        tensors_by_layer([wrong], SIZES, PATH)


def test_a_file_without_latent_attention_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"has none of attn_kv_b, attn_k_b, attn_v_b"):
        tensors_by_layer([TensorInfo("blk.0.attn_k.weight", (3, 256), F32)], SIZES, PATH)


@pytest.mark.parametrize(("there", "missing"), [(K, "attn_v_b"), (V, "attn_k_b")])
def test_half_a_layer_is_refused(there: Role, missing: str) -> None:
    infos = [*infos_of("split"), TensorInfo(tensor_name(5, there), SIZES.shape(there, "split"), F32)]
    with pytest.raises(
        BadRequest, match=rf"model.gguf: blk.5.{missing}.weight is missing, and blk.5.attn_kv_b"
    ):
        tensors_by_layer(infos, SIZES, PATH)


@pytest.mark.parametrize("found", LAYOUTS)
@pytest.mark.parametrize("wanted", LAYOUTS)
def test_metadata_become_those_of_the_layout_in_its_order(found: MLALayout, wanted: MLALayout) -> None:
    changed = metadata_in(keys_of(found), found, wanted, SIZES)
    assert list(changed.items()) == list(keys_of(wanted).items())


def test_a_norm_that_is_true_stays_and_a_false_one_goes_only_with_both() -> None:
    true, false = Value.bool_(True), Value.bool_(False)
    pairs: list[tuple[MLALayout, MLALayout]] = [("both", "split"), ("split", "both"), ("none", "split")]
    for found, wanted in pairs:
        metadata = metadata_in(keys_of(found, expert_weights_norm=true), found, wanted, SIZES)
        assert metadata["deepseek2.expert_weights_norm"] == true
    kept = metadata_in(keys_of("none", expert_weights_norm=false), "none", "split", SIZES)
    assert kept["deepseek2.expert_weights_norm"] == false


def test_the_size_label_follows_the_layout_unless_somebody_chose_it() -> None:
    def label(infos: list[TensorInfo]) -> Value:
        return Value.string(count_parameters((info.name, info.shape) for info in infos).size_label)

    old, new = infos_of("none"), infos_of("both")
    computed, chosen, expected = label(old), Value.string("2x7B"), label(new)
    assert expected != computed
    assert relabelled({"general.size_label": computed}, old, new) == {"general.size_label": expected}
    assert relabelled({"general.size_label": chosen}, old, new) == {"general.size_label": chosen}
    assert relabelled({}, old, new) == {}
