from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from gguf_tools.errors import BadImportance, BadRequest
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.tensors import TensorInfo
from quantize.importances.entries import Importance, ResolvedImportance, refuse_nonfinite, resolve, select

N_HEADS, NOPE, V, LORA = 4, 32, 16, 64

ATTN_K_B_3D = TensorInfo("blk.0.attn_k_b.weight", (N_HEADS, LORA, NOPE), F32)
ATTN_K_B_2D = TensorInfo("blk.0.attn_k_b.weight", (N_HEADS * LORA, NOPE), F32)
ATTN_V_B_3D = TensorInfo("blk.0.attn_v_b.weight", (N_HEADS, V, LORA), F32)
ATTN_V_B_2D = TensorInfo("blk.0.attn_v_b.weight", (N_HEADS * V, LORA), F32)
ATTN_KV_B = TensorInfo("blk.0.attn_kv_b.weight", (N_HEADS * (NOPE + V), LORA), F32)
EXPERTS = TensorInfo("blk.1.ffn_up_exps.weight", (8, 3, 64), F32)


def sums(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).random(shape, np.float32) * 1000


def entry(values: npt.NDArray[np.float32], *counts: float) -> Importance:
    return Importance(values, np.array(counts, np.float32))


def fitted(
    tensor: TensorInfo, importance: Importance, name: str | None = None, n_heads: int | None = N_HEADS
) -> ResolvedImportance:
    found = resolve(tensor, {name or tensor.name: importance}, n_heads)
    assert found is not None
    return found


def weights_by_row(tensor: TensorInfo, found: ResolvedImportance) -> npt.NDArray[np.float32]:
    return np.stack([found.weighting_of_row(row).values for row in range(tensor.n_rows)])


def test_weights_are_means_and_neutral_where_nothing_was_seen() -> None:
    values = sums(3, 5)
    weights = entry(values, 7, 0, 3).weights()
    assert weights.dtype == np.float32
    assert (weights[0] == values[0] / np.float32(7)).all()
    assert (weights[1] == 1).all()
    assert (weights[2] == values[2] / np.float32(3)).all()


def test_counts_are_whole_numbers_as_in_llama_quantize() -> None:
    assert entry(sums(5, 2), 0.4, 0.5, 1.5, 2.4999, -3).whole_counts().tolist() == [0, 1, 2, 2, -3]


def test_one_row_per_expert() -> None:
    importance = entry(sums(8, 64), *range(8))
    found = fitted(EXPERTS, importance)
    assert (found.entry, found.rows_per_weights, found.n_neutral) == (EXPERTS.name, 3, 1)
    assert (weights_by_row(EXPERTS, found) == np.repeat(importance.weights(), 3, axis=0)).all()
    assert (found.weights() == importance.weights()).all()


def test_experts_end_to_end_with_one_count() -> None:
    """As in a .dat file, where an expert that saw nothing is stored as weights of 1."""
    values = sums(8, 64)
    values[2] = 5
    found = fitted(EXPERTS, entry(values.reshape(1, -1), 5))
    assert (found.weights() == values / np.float32(5)).all()
    assert (found.rows_per_weights, found.n_neutral) == (3, 1)


def test_one_row_for_all_matrices_is_reported() -> None:
    found = fitted(EXPERTS, entry(sums(1, 64), 2))
    assert (found.rows_per_weights, found.reason) == (24, "one row for all")


@pytest.mark.parametrize("tensor", [ATTN_K_B_3D, ATTN_K_B_2D])
def test_each_head_of_attn_k_b_has_its_own_weights_in_both_layouts(tensor: TensorInfo) -> None:
    values = sums(1, N_HEADS * NOPE)
    found = fitted(tensor, entry(values, 9))
    per_head = (values / np.float32(9)).reshape(N_HEADS, NOPE)
    assert (weights_by_row(tensor, found) == np.repeat(per_head, LORA, axis=0)).all()
    assert found.reason == "one row per head"


@pytest.mark.parametrize("tensor", [ATTN_K_B_3D, ATTN_K_B_2D])
def test_old_data_of_attn_k_b_without_heads_serves_all_of_them(tensor: TensorInfo) -> None:
    found = fitted(tensor, entry(sums(1, NOPE), 9))
    assert (found.rows_per_weights, found.reason) == (N_HEADS * LORA, "one row for all")


@pytest.mark.parametrize("tensor", [ATTN_V_B_3D, ATTN_V_B_2D])
def test_attn_v_b_per_head_in_both_layouts(tensor: TensorInfo) -> None:
    values = sums(1, N_HEADS * LORA)
    found = fitted(tensor, entry(values, 9))
    per_head = (values / np.float32(9)).reshape(N_HEADS, LORA)
    assert (weights_by_row(tensor, found) == np.repeat(per_head, V, axis=0)).all()


@pytest.mark.parametrize("tensor", [ATTN_V_B_3D, ATTN_V_B_2D])
def test_attn_v_b_takes_the_data_of_attn_kv_b(tensor: TensorInfo) -> None:
    importance = entry(sums(1, LORA), 9)
    found = fitted(tensor, importance, ATTN_KV_B.name)
    assert found.entry == ATTN_KV_B.name
    assert found.reason == "from blk.0.attn_kv_b.weight, one row for all"
    assert (weights_by_row(tensor, found) == importance.weights()).all()


def test_attn_kv_b_takes_the_data_of_attn_v_b() -> None:
    importance = entry(sums(1, LORA), 9)
    found = fitted(ATTN_KV_B, importance, ATTN_V_B_3D.name)
    assert (found.weights() == importance.weights()).all()


def test_attn_kv_b_gets_the_mean_over_the_heads_of_attn_v_b() -> None:
    values = sums(N_HEADS, LORA)
    found = fitted(ATTN_KV_B, entry(values.reshape(1, -1), 9), ATTN_V_B_3D.name)
    assert (found.rows_per_weights, found.n_neutral) == (ATTN_KV_B.n_rows, 0)
    assert found.reason == "from blk.0.attn_v_b.weight, mean over heads"
    np.testing.assert_allclose(found.weights()[0], values.mean(axis=0) / 9, rtol=1e-6)


def test_heads_that_saw_more_weigh_more_in_the_mean() -> None:
    values, counts = sums(N_HEADS, LORA), np.array([1, 5, 0, 2], np.float32)
    found = fitted(ATTN_KV_B, Importance(values, counts), ATTN_V_B_3D.name)
    np.testing.assert_allclose(found.weights()[0], values[[0, 1, 3]].sum(axis=0) / 8, rtol=1e-6)


def test_own_data_goes_before_a_siblings() -> None:
    own, other = entry(sums(1, LORA, seed=1), 2), entry(sums(1, LORA, seed=2), 3)
    found = resolve(ATTN_KV_B, {ATTN_KV_B.name: own, ATTN_V_B_3D.name: other}, N_HEADS)
    assert found is not None
    assert (found.entry, found.reason) == (ATTN_KV_B.name, "")
    assert (found.weights() == own.weights()).all()


@pytest.mark.parametrize(
    ("tensor", "other", "n_mats"),
    [
        ("ffn_gate_exps", "ffn_gate_up_exps", 8),
        ("ffn_up_exps", "ffn_gate_up_exps", 8),
        ("ffn_gate_up_exps", "ffn_gate_exps", 8),
        ("ffn_gate_up_exps", "ffn_up_exps", 8),
        ("ffn_gate", "ffn_gate_up", 1),
        ("ffn_gate_up_shexp", "ffn_up_shexp", 1),
        ("attn_k", "attn_qkv", 1),
        ("attn_qkv", "attn_q", 1),
    ],
)
def test_merged_matrices_and_their_parts_share_data(tensor: str, other: str, n_mats: int) -> None:
    data = entry(sums(n_mats, 64), *range(1, n_mats + 1))
    shape = (n_mats, 32, 64) if n_mats > 1 else (32, 64)
    info, name = TensorInfo(f"blk.3.{tensor}.weight", shape, F32), f"blk.3.{other}.weight"
    found, own = resolve(info, {name: data}), resolve(info, {info.name: data})
    assert found is not None
    assert own is not None
    assert (found.entry, found.reason.split(",")[0]) == (name, f"from {name}")
    assert (found.weights() == own.weights()).all()


def test_other_tensors_have_no_sibling() -> None:
    assert resolve(ATTN_K_B_3D, {ATTN_KV_B.name: entry(sums(1, LORA), 1)}, N_HEADS) is None


@pytest.mark.parametrize(
    ("tensor", "size", "expected"),
    [
        (EXPERTS, 7 * 64, r"have 448 values, expected 64 \(one row for all\) or 512 \(one row per matrix\)"),
        (EXPERTS, 65, "have 65 values"),
        (ATTN_K_B_2D, 2 * NOPE, r"expected 32 \(one row for all\) or 128 \(one row per head\)"),
        (TensorInfo("blk.0.attn_q.weight", (8, 64), F32), 128, "128 values, expected 64 for shape 8 x 64"),
    ],
)
def test_a_size_that_fits_nothing(tensor: TensorInfo, size: int, expected: str) -> None:
    with pytest.raises(BadImportance, match=expected):
        fitted(tensor, entry(sums(1, size), 1))


def test_heads_below_each_other_need_the_number_of_heads() -> None:
    with pytest.raises(BadImportance, match="expected 32 for shape 256 x 32"):
        fitted(ATTN_K_B_2D, entry(sums(1, N_HEADS * NOPE), 1), n_heads=None)


def test_counts_that_fit_no_matrix() -> None:
    with pytest.raises(BadImportance, match="found 2 counts for 8 rows"):
        fitted(EXPERTS, Importance(sums(2, 4 * 64), np.ones(2, np.float32)))


def test_data_of_the_embeddings_is_passed_over() -> None:
    tensor = TensorInfo("token_embd.weight", (100, 64), F32)
    assert resolve(tensor, {tensor.name: entry(sums(1, 100), 1)}) is None


def test_select() -> None:
    entries = {name: entry(sums(1, 4), 1) for name in ("blk.0.attn_q", "blk.0.ffn_up", "blk.1.ffn_up")}
    assert list(select(entries)) == list(entries)
    assert list(select(entries, include=["ffn", "attn_k"])) == ["blk.0.ffn_up", "blk.1.ffn_up"]
    assert list(select(entries, exclude=["blk.0"])) == ["blk.1.ffn_up"]
    with pytest.raises(BadRequest):
        select(entries, include=["a"], exclude=["b"])


def test_nonfinite_numbers_are_refused() -> None:
    good = entry(sums(1, 4), 1)
    refuse_nonfinite({"a": good})
    bad = entry(np.array([[1, 2, np.inf, 3]], np.float32), 1)
    with pytest.raises(BadImportance, match=r"b: importance values number 2 is inf"):
        refuse_nonfinite({"a": good, "b": bad})
    with pytest.raises(BadImportance, match=r"b: importance counts number 0 is nan"):
        refuse_nonfinite({"b": entry(sums(1, 4), np.nan)})
