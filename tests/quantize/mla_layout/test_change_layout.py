"""Whole files: what keeps its bytes, what is refused, split sets, options without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_tools import open_gguf
from gguf_tools.errors import BadRequest, ExecutionError, QuantError
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format import ggml_types as types
from gguf_tools.format.ggml_types import F16, F32, Q4_0, Q4_K, Q5_0, Q8_0, GGMLType
from gguf_tools.format.shards import layouts_of, shard_paths
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize.fill.provenance import PROVENANCE_KEY, provenance_value
from quantize.mla_layout.layouts import HeadSizes, tensor_name
from quantize.mla_layout.pipeline import change_layout
from quantize.plan.overrides import parse_overrides
from tests.quantize.mla_layout.models import KV, SIZES, K, V, any_bytes, infos_of, keys_of, model, raw, write

REGROUPED = [
    type_
    for type_ in types.TYPES
    if not type_.is_internal
    and not type_.tensor_meta_bytes
    and not SIZES.kv_lora % type_.block_elems
    and not SIZES.value % type_.rows_interleaved
]
"""Every type that a file may have, those of ik_llama.cpp that can't be decoded here too."""


@pytest.mark.parametrize("type_", REGROUPED, ids=str)
def test_value_rows_of_any_type_are_regrouped_row_by_row(type_: GGMLType, tmp_path: Path) -> None:
    """attn_kv_b and attn_k_b are there, attn_v_b is not, so no value has to be decoded."""
    infos = [info for info in infos_of("both", {KV: type_, K: F16, V: F16}) if "attn_v_b" not in info.name]
    metadata = keys_of("none")
    path = write(tmp_path / "in.gguf", metadata, {info: any_bytes(info) for info in infos})
    for wanted in ("split", "both"):
        change_layout(path, tmp_path / "out.gguf", wanted, force=True)
        for layer in range(2):
            row_bytes = type_.row_bytes(SIZES.kv_lora)
            stored = np.frombuffer(raw(path, layer, KV), np.uint8).reshape(3, SIZES.head_rows, row_bytes)
            assert raw(tmp_path / "out.gguf", layer, V) == stored[:, SIZES.nope :].tobytes()
            assert raw(tmp_path / "out.gguf", layer, K) == raw(path, layer, K)
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.tensor(tensor_name(0, V)).type == type_


@pytest.mark.parametrize("type_", [types.IQ4_KS, types.Q4_0_R8, types.Q6_0, Q4_0], ids=str)
def test_reshaping_and_dropping_touch_no_block(type_: GGMLType, tmp_path: Path) -> None:
    keys = Q8_0 if type_.block_elems > 32 else type_
    both = model(tmp_path / "both.gguf", "both", {KV: type_, K: keys, V: type_})
    change_layout(both, tmp_path / "split.gguf", "split")
    change_layout(both, tmp_path / "none.gguf", "none")
    for layer in range(2):
        for role in (K, V):
            assert raw(tmp_path / "split.gguf", layer, role) == raw(both, layer, role)
        assert raw(tmp_path / "none.gguf", layer, KV) == raw(both, layer, KV)


def test_what_cannot_be_decoded_is_refused_in_one_line_before_anything_is_written(tmp_path: Path) -> None:
    path = model(tmp_path / "in.gguf", "none", types.IQ2_BN)
    with pytest.raises(
        QuantError, match=r"blk.0-1.attn_kv_b.weight \(IQ2_BN\) must be decoded.*mla split"
    ) as e:
        change_layout(path, tmp_path / "out.gguf", "split")
    assert "\n" not in str(e.value)
    with pytest.raises(
        QuantError, match=r"blk.0-1.attn_k_b.weight: Q8_KV_R8 can't be encoded here; choose one of"
    ):
        change_layout(
            model(path, "none", Q4_0), tmp_path / "out.gguf", "split",
            overrides=parse_overrides(["attn_k_b=Q8_KV_R8"]),
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == [path]


def test_heads_that_cut_a_group_of_interleaved_rows_are_refused(tmp_path: Path) -> None:
    sizes = HeadSizes(n_heads=4, nope=32, rope=16, value=24, kv_lora=256)
    infos = [
        TensorInfo(tensor_name(0, KV), sizes.shape(KV, "both"), types.Q8_K_R16),
        TensorInfo(tensor_name(0, K), sizes.shape(K, "both"), F16),
    ]
    path = write(tmp_path / "in.gguf", keys_of("none", sizes), {info: any_bytes(info) for info in infos})
    with pytest.raises(QuantError, match=r"attn_kv_b.weight \(Q8_K_R16\) must be decoded"):
        change_layout(path, tmp_path / "out.gguf", "split")


def test_a_scale_behind_the_last_row_is_refused(tmp_path: Path) -> None:
    odd = TensorInfo("blk.0.ffn_up.weight", (4, 64), types.I2_S)
    infos = [odd, *infos_of("none", F16)]
    path = write(tmp_path / "in.gguf", keys_of("none"), {info: any_bytes(info) for info in infos})
    with pytest.raises(BadRequest, match=r"blk.0.ffn_up.weight is I2_S, which keeps a scale behind"):
        change_layout(path, tmp_path / "out.gguf", "split")


def test_nan_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    infos = infos_of("none", F16)
    data = {info: any_bytes(info) for info in infos}
    data[infos[1]] = b"\xff" * infos[1].n_bytes
    path = write(tmp_path / "in.gguf", keys_of("none"), data)
    with pytest.raises(ExecutionError, match=r"blk.1.attn_k_b.weight: weight at row 0, column 0 is nan"):
        change_layout(path, tmp_path / "out.gguf", "split", n_threads=1)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("type_", [{K: Q4_0, V: Q4_0}, {K: Q5_0, V: Q4_K}, {K: F16, V: Q8_0}])
def test_there_and_back_gives_the_same_file(type_: Any, tmp_path: Path) -> None:
    split = model(tmp_path / "split.gguf", "split", type_)
    change_layout(split, tmp_path / "both.gguf", "both")
    change_layout(tmp_path / "both.gguf", tmp_path / "back.gguf", "split")
    assert (tmp_path / "back.gguf").read_bytes() == split.read_bytes()


def test_a_file_that_has_the_layout_is_left_alone(tmp_path: Path) -> None:
    path = model(tmp_path / "in.gguf", "split", Q4_0)
    result = change_layout(path, tmp_path / "out.gguf", "split")
    assert (result.written, result.paths) == (None, ())
    assert list(tmp_path.iterdir()) == [path]


def test_only_metadata_may_have_to_change(tmp_path: Path) -> None:
    path = model(tmp_path / "in.gguf", "none", F16, attention__head_count_kv=Value.u32(1))
    result = change_layout(path, tmp_path / "out.gguf", "none")
    assert result.paths == (tmp_path / "out.gguf",)
    with open_gguf(path) as before, open_gguf(tmp_path / "out.gguf") as after:
        assert after.get("deepseek2.attention.head_count_kv") == 3
        assert after.tensors == before.tensors


def test_what_tensors_were_made_of_is_not_said_of_others(tmp_path: Path) -> None:
    """gguf_tools.provenance holds a number for each tensor, in their order."""
    infos = infos_of("both", F16)
    metadata = keys_of("both") | {PROVENANCE_KEY: provenance_value(range(1, len(infos) + 1))}
    path = write(tmp_path / "in.gguf", metadata, {info: any_bytes(info) for info in infos})
    assert change_layout(path, tmp_path / "out.gguf", "both").paths == ()
    change_layout(path, tmp_path / "out.gguf", "split")
    with open_gguf(tmp_path / "out.gguf") as file:
        assert PROVENANCE_KEY not in file.metadata


def write_split(path: Path, metadata: dict[str, Value], groups: list[list[TensorInfo]]) -> list[Path]:
    paths = shard_paths(path, len(groups))
    for shard, layout in zip(paths, layouts_of(metadata, groups), strict=True):
        with GGUFWriter(shard, layout) as writer:
            for info in layout.tensors:
                writer.write(layout.offset_of(info.name), any_bytes(info))
            writer.publish()
    return paths


def test_split_sets_become_one_file_or_as_many(tmp_path: Path) -> None:
    """Of three parts the first holds metadata alone, and the second and third a half of a layer each."""
    infos = [TensorInfo("token_embd.weight", (4, 32), F32), *infos_of("split", Q4_0)]
    parts = write_split(tmp_path / "in.gguf", keys_of("split"), [[], infos[:2], infos[2:]])
    whole = write(tmp_path / "whole.gguf", keys_of("split"), {info: any_bytes(info) for info in infos})

    change_layout(parts[1], tmp_path / "one.gguf", "both")
    change_layout(whole, tmp_path / "expected.gguf", "both")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "expected.gguf").read_bytes()

    result = change_layout(parts[0], tmp_path / "many.gguf", "both", keep_split=True)
    with open_gguf(result.paths[2]) as many, open_gguf(tmp_path / "one.gguf") as one:
        assert [len(shard.tensors) for shard in many.shards] == [0, 3, 4]
        assert many.metadata == one.metadata
        assert {name: bytes(many.raw(name)) for name in many.tensors} == {
            name: bytes(one.raw(name)) for name in one.tensors
        }
    with pytest.raises(BadRequest, match=r"keep_split=True needs a split source"):
        change_layout(whole, tmp_path / "x.gguf", "both", keep_split=True)
