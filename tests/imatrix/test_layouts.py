"""One row of importances for all heads, as ik_llama.cpp's llama-quantize takes it for 2-D matrices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gguf_tools.commands.imatrix
from gguf_tools.errors import BadImportance, BadRequest
from imatrix.repair import in_layout_both
from imatrix.store import load
from quantize.importances.entries import Importance, ImportanceFile

ROOT = Path(__file__).parents[2]
MATRIX = ROOT / "tests" / "golden" / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"
MODEL = ROOT / "examples" / "tiny-deepseek-v3"
K, V, KV = (f"blk.0.attn_{part}_b.weight" for part in ("k", "v", "kv"))


def matrix(**entries: Importance) -> ImportanceFile:
    names = {"k": K, "v": V, "kv": KV, "q": "blk.0.attn_q.weight"}
    return ImportanceFile({names[key]: entry for key, entry in entries.items()}, (), 1, 512)


def rows(values: list[list[float]], counts: list[float]) -> Importance:
    return Importance(np.array(values, np.float32), np.array(counts, np.float32))


def test_heads_become_their_mean_and_attn_kv_b_an_entry() -> None:
    contents = matrix(
        k=rows([[1, 2, 3, 6]], [8]), v=rows([[2, 4, 6], [4, 8, 0]], [8, 8]), q=rows([[7, 7]], [8])
    )
    got = in_layout_both(contents, 2, {K: 2, V: 3}).entries
    assert list(got) == [K, KV, "blk.0.attn_q.weight", V]
    assert got[K].read().tolist() == [[2, 4]]
    assert got[V].read().tolist() == got[KV].read().tolist() == [[3, 6, 3]]
    assert [got[name].counts.tolist() for name in (K, V, KV)] == [[8]] * 3
    assert got["blk.0.attn_q.weight"] is contents.entries["blk.0.attn_q.weight"]


def test_what_is_in_place_stays() -> None:
    contents = matrix(k=rows([[1, 2]], [8]), kv=rows([[5, 5]], [8]), v=rows([[1, 3], [0, 0]], [8, 0]))
    got = in_layout_both(contents, 2, {K: 2, V: 2}).entries
    assert got[K] is contents.entries[K]
    assert got[KV] is contents.entries[KV]
    assert got[V].read().tolist() == [[1, 3]]  # the other head has seen nothing


def test_a_matrix_of_another_model_is_refused() -> None:
    with pytest.raises(BadImportance, match="found 3 values and 1 counts, expected those of 2 heads"):
        in_layout_both(matrix(k=rows([[1, 2, 3]], [8])), 2, {K: 4})
    with pytest.raises(BadRequest, match="the model does not say how many"):
        in_layout_both(matrix(k=rows([[1, 2, 3]], [8])), None, {})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ik.dat"
    assert (
        gguf_tools.commands.imatrix.main(
            ["convert", "--mla", "both", "--model", str(MODEL), str(MATRIX), str(out)]
        )
        == 0
    )
    got, plain = load(out).entries, load(MATRIX).entries
    assert {name: entry.shape for name, entry in got.items() if "_b." in name and ".0." in name} == {
        "blk.0.attn_k_b.weight": (1, 128),
        "blk.0.attn_kv_b.weight": (1, 256),
        "blk.0.attn_q_b.weight": (1, 256),
        "blk.0.attn_v_b.weight": (1, 256),
    }
    expected = plain[V].weights().reshape(4, 256).mean(axis=0)
    np.testing.assert_allclose(got[KV].weights()[0], expected, rtol=1e-6)
    assert set(got) - set(plain) == {f"blk.{layer}.attn_kv_b.weight" for layer in range(3)}
    capsys.readouterr()
    assert gguf_tools.commands.imatrix.main(["convert", "--mla", "both", str(MATRIX), str(out)]) == 2
    assert "--mla both needs --model" in capsys.readouterr().err
    assert gguf_tools.commands.imatrix.main(["--in-file", str(MATRIX), "--mla", "both", "-o", str(out)]) == 2
