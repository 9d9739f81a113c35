"""Importances of other architectures against llama-imatrix's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gguf_cli.imatrix import main
from imatrix.store import load
from quantize.roles import layer_of

pytest.importorskip("torch")

GOLDEN = Path(__file__).parents[1] / "golden" / "arch"

WORST = {
    "kimi-k2": 1e-2,
    "kimi-k2.5": 1e-2,
    "glm-4.7-flash": 1e-2,
    # Of 128 positions 16 are chosen. With caches in float32, other choices made this 1.7e-2.
    "deepseek-v3.2": 1e-3,
}
"""Case -> the largest relative difference of an entry."""


@pytest.mark.parametrize("case", WORST)
def test_importances_are_llama_imatrix_s(case: str, calibration: Path, tmp_path: Path) -> None:
    expected = load(GOLDEN / "imatrix" / f"{case}.imatrix.gguf").entries
    words = ["-m", str(GOLDEN / "models" / case), "-f", str(calibration), "-o", str(tmp_path / "im.gguf")]
    assert main([*words, "-c", "128", "--chunks", "16", "--threads", "1"]) == 0
    found = load(tmp_path / "im.gguf").entries
    # attn_kv_b is the same matrix in another layout; its importances come with those of attn_k_b.
    # llama-imatrix has none of the MTP layer, behind the last one (tests/forward/test_mtp.py).
    drafting = f"blk.{1 + max(layer_of(name) or 0 for name in expected)}."
    there = {name for name in found if not name.startswith(drafting)}
    assert {name for name in there if not name.endswith("attn_kv_b.weight")} == set(expected)
    errors = []
    for name, entry in expected.items():
        ours, theirs = (e.values.astype(np.float64).reshape(-1) for e in (found[name], entry))
        errors.append(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
        counts, recorded = found[name].counts, entry.counts
        assert np.abs(counts - recorded).max() <= 0.005 * recorded.max(), name
    assert max(errors) < WORST[case]
    assert np.median(errors) < 1.2e-3
