"""What is decoded and encoded again: head by head, each with its own importances."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from gguf_tools import open_gguf
from gguf_tools.errors import NeedsImportance
from gguf_tools.format.ggml_types import Q4_0, Q5_0, Q8_0, GGMLType
from gguf_tools.format.tensors import TensorInfo
from quantize.importances.entries import Importance
from quantize.mla_layout.layouts import HeadSizes, roles_in, tensor_name
from quantize.mla_layout.pipeline import LayoutOptions, change_layout, prepare
from quantize.plan.overrides import parse_overrides
from quantize.roles import MLALayout, Role
from tests.quantize.codecs import decode, encode
from tests.quantize.mla_layout.models import KV, K, V, keys_of, model, raw, write

N_HEADS = 16
WIDE = HeadSizes(n_heads=N_HEADS, nope=32, rope=16, value=24, kv_lora=64)


def wide_model(path: Path, layout: MLALayout, chosen: Mapping[Role, GGMLType]) -> Path:
    """Write one layer of 16 heads of normal numbers, encoded."""
    tensors = {}
    for role in roles_in(layout):
        info = TensorInfo(tensor_name(0, role), WIDE.shape(role, layout), chosen[role])
        values = np.random.default_rng(info.n_rows).standard_normal((info.n_rows, info.n_cols))
        tensors[info] = encode(info.type, values.astype(np.float32), None).tobytes()
    return write(path, keys_of(layout, WIDE), tensors)


def decoded(path: Path, role: Role) -> np.ndarray:
    """The values per head: (n_heads, rows, columns)."""
    with open_gguf(path) as file:
        info = file.tensor(tensor_name(0, role))
        values = decode(info.type, file.raw(info.name).reshape(info.n_rows, -1))
    return values.reshape(N_HEADS, -1, info.n_cols)


def importance_per_head(n_cols: int, seed: int) -> Importance:
    values = np.random.default_rng(seed).uniform(0.01, 9, (N_HEADS, n_cols)) ** 3
    return Importance(values.astype(np.float32), np.arange(1, N_HEADS + 1, dtype=np.float32))


@pytest.mark.parametrize("to", ["split", "both"])
@pytest.mark.parametrize("known", [True, False])
def test_keys_are_encoded_head_by_head_with_each_heads_importances(
    known: bool, to: MLALayout, tmp_path: Path
) -> None:
    path = wide_model(tmp_path / "in.gguf", "none", {KV: Q5_0})
    data = importance_per_head(WIDE.nope, 1)
    result = change_layout(
        path, tmp_path / "out.gguf", to, overrides=parse_overrides(["attn_k_b=Q4_0"]),
        importances={tensor_name(0, K): data} if known else None,
    )  # fmt: skip
    keys = np.ascontiguousarray(decoded(path, KV)[:, : WIDE.nope].transpose(0, 2, 1))
    expected = [
        encode(Q4_0, head, weights if known else None)
        for head, weights in zip(keys, data.weights(), strict=True)
    ]
    assert raw(tmp_path / "out.gguf", 0, K) == np.concatenate(expected).tobytes()
    assert raw(tmp_path / "out.gguf", 0, V) == _rows_of(raw(path, 0, KV), WIDE.nope, WIDE.head_rows)
    assert any("weighed by importances" in line for line in result.change.lines()) == known


def _rows_of(data: bytes, first: int, last: int) -> bytes:
    return np.frombuffer(data, np.uint8).reshape(N_HEADS, WIDE.head_rows, -1)[:, first:last].tobytes()


@pytest.mark.parametrize("groups", [N_HEADS, 1, 0])
@pytest.mark.parametrize("to", ["none", "both"])
def test_joined_heads_keep_value_blocks_and_encode_keys(groups: int, to: MLALayout, tmp_path: Path) -> None:
    path = wide_model(tmp_path / "in.gguf", "split", {K: Q8_0, V: Q4_0})
    data = importance_per_head(WIDE.kv_lora, 2)
    data = Importance(data.values[:groups], data.counts[:groups])
    change_layout(
        path, tmp_path / "out.gguf", to, overrides=parse_overrides(["attn_kv_b=Q4_0"]),
        importances={tensor_name(0, KV): data} if groups else None,
    )  # fmt: skip
    keys = np.ascontiguousarray(decoded(path, K).transpose(0, 2, 1))
    weights = [*data.weights()] * (N_HEADS // groups) if groups else [None] * N_HEADS
    expected = [encode(Q4_0, head, w) for head, w in zip(keys, weights, strict=True)]
    joined = raw(tmp_path / "out.gguf", 0, KV)
    assert _rows_of(joined, 0, WIDE.nope) == np.concatenate(expected).tobytes()
    assert _rows_of(joined, WIDE.nope, WIDE.head_rows) == raw(path, 0, V)


def test_without_a_type_by_hand_all_of_attn_kv_b_is_q8_0(tmp_path: Path) -> None:
    path = wide_model(tmp_path / "in.gguf", "split", {K: Q5_0, V: Q4_0})
    change_layout(path, tmp_path / "out.gguf", "none")
    rows_ = np.concatenate([decoded(path, K).transpose(0, 2, 1), decoded(path, V)], axis=1)
    expected = encode(Q8_0, rows_.reshape(-1, WIDE.kv_lora), None)
    assert raw(tmp_path / "out.gguf", 0, KV) == expected.tobytes()


def test_values_can_be_given_another_type(tmp_path: Path) -> None:
    path = wide_model(tmp_path / "in.gguf", "none", {KV: Q5_0})
    change_layout(path, tmp_path / "out.gguf", "split", overrides=parse_overrides(["attn_v_b=Q4_0"]))
    values = np.ascontiguousarray(decoded(path, KV)[:, WIDE.nope :]).reshape(-1, WIDE.kv_lora)
    assert raw(tmp_path / "out.gguf", 0, V) == encode(Q4_0, values, None).tobytes()


@pytest.mark.parametrize("n_threads", [1, 3])
def test_bytes_do_not_depend_on_threads_or_chunks(
    n_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = wide_model(tmp_path / "in.gguf", "split", {K: Q5_0, V: Q4_0})
    overrides = parse_overrides(["attn_kv_b=Q4_0"])
    change_layout(path, tmp_path / "a.gguf", "both", overrides=overrides)
    monkeypatch.setattr("quantize.fill.filling.CHUNK_ELEMS", 64 * 37)
    change_layout(path, tmp_path / "b.gguf", "both", overrides=overrides, n_threads=n_threads)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_a_type_that_needs_importances_says_so(tmp_path: Path) -> None:
    path = model(tmp_path / "in.gguf", "split", {K: Q8_0, V: Q8_0})
    with pytest.raises(NeedsImportance, match=r"2 tensors of.*need.*importances: blk.0-1.attn_kv_b"):
        change_layout(path, tmp_path / "o", "none", overrides=parse_overrides(["attn_kv_b=IQ2_XXS"]))


def test_options_without_effect_are_noted(tmp_path: Path) -> None:
    path = model(tmp_path / "in.gguf", "none", Q4_0)
    data = Importance(np.ones((3, 32), np.float32), np.ones(3, np.float32))
    with open_gguf(path) as source:
        change = prepare(
            source, tmp_path / "o", "split",
            LayoutOptions(
                parse_overrides(["attn_k_b=Q8_0", "k_b=Q5_0", "ffn_up=Q8_0"]), {tensor_name(0, K): data}
            ),
        )  # fmt: skip
    assert change.notes == (
        "--tensor-type 'k_b=Q5_0' has no effect: an earlier one decides",
        "--tensor-type 'ffn_up=Q8_0' has no effect: it matches no tensor that has to be made",
        "the importance matrix has no effect: nothing is encoded to a type that looks at importances",
    )


def test_tensors_without_data_are_noted(tmp_path: Path) -> None:
    path = model(tmp_path / "in.gguf", "none", Q4_0)
    data = Importance(np.ones((3, 32), np.float32), np.ones(3, np.float32))
    with open_gguf(path) as source:
        change = prepare(
            source, tmp_path / "o", "split",
            LayoutOptions(parse_overrides(["attn_k_b=Q5_0"]), {tensor_name(0, K): data}),
        )  # fmt: skip
    assert list(change.importances) == [tensor_name(0, K)]
    assert change.notes == ("no data in the importance matrix: blk.1.attn_k_b.weight",)
