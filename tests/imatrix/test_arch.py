"""Importances of other architectures against llama-imatrix's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.commands.imatrix import main
from gguf_tools.format import keys
from gguf_tools.format.loaders import LOADERS
from imatrix.store import load
from quantize.roles import layer_of

pytest.importorskip("torch")

GOLDEN = Path(__file__).parents[1] / "golden" / "arch"

CASES = ("kimi-k2", "kimi-k2.5", "glm-4.7-flash", "deepseek-v3.2")
HALF = 2.0**-11
"""The largest relative error of a number in float16, as llama.cpp's caches have them."""


@pytest.fixture
def betas_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take YaRN's betas from the keys, as llama-imatrix was told to by --yarn-beta-fast."""
    loader = LOADERS["deepseek2"]
    betas = {keys.ROPE_SCALING_YARN_BETA_FAST, keys.ROPE_SCALING_YARN_BETA_SLOW}
    known = {**LOADERS, "deepseek2": replace(loader, optional=loader.optional | betas)}
    monkeypatch.setattr("gguf_tools.format.hparams.LOADERS", known)


@pytest.mark.usefixtures("betas_count")
@pytest.mark.parametrize("case", CASES)
def test_importances_are_llama_imatrix_s(case: str, calibration: Path, tmp_path: Path) -> None:
    expected = load(GOLDEN / "imatrix" / f"{case}.imatrix.gguf").entries
    words = ["-m", str(GOLDEN / "models" / case), "-f", str(calibration), "-o", str(tmp_path / "im.gguf")]
    assert main([*words, "-c", "128", "--chunks", "16", "--threads", "1"]) == 0
    found = load(tmp_path / "im.gguf").entries
    # attn_kv_b is the same matrix in another layout; its importances come with those of attn_k_b.
    # llama-imatrix has none of the MTP layer, behind the last one (tests/imatrix/forward/test_mtp.py).
    drafting = f"blk.{1 + max(layer_of(name) or 0 for name in expected)}."
    there = {name for name in found if not name.startswith(drafting)}
    assert {name for name in there if not name.endswith("attn_kv_b.weight")} == set(expected)
    for name, entry in expected.items():
        ours, theirs = (e.values.astype(np.float64).reshape(-1) for e in (found[name], entry))
        counts, recorded = found[name].counts, entry.counts
        # Where two experts score nearly alike, a token may go to the other one.
        moved = np.abs(counts - recorded).max() / recorded.max()
        assert moved <= (0.005 if "_exps" in name else 0), name
        assert np.linalg.norm(ours - theirs) < (HALF + 2 * moved) * np.linalg.norm(theirs), name
