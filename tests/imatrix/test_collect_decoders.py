"""Importances of ordinary decoders equal llama-imatrix's, recorded for small models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gguf_tools.commands.imatrix
from imatrix.store import load

GOLDEN = Path(__file__).parents[1] / "golden" / "arch"

CASES = (
    "deepseek-v1-moe", "glm4moe-air", "gpt-oss", "llama-r1-distill", "mixtral", "qwen2-r1-distill",
    "qwen3-r1-0528", "qwen3moe",
)  # fmt: skip

MTP = {"glm4moe-air": "blk.2."}
"""Beginning of the names in an MTP layer."""

MEDIAN = {"gpt-oss": 2e-3}
"""Median error of llama.cpp's values: it rounds activations of MXFP4, and YaRN's ramp (1e-3 otherwise)."""


@pytest.mark.parametrize("case", CASES)
def test_entries_counts_and_values(case: str, calibration: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = ["-m", str(GOLDEN / "models" / case), "-f", str(calibration), "-o", str(tmp_path / "m.gguf")]
    assert gguf_tools.commands.imatrix.main([*words, "-c", "128", "--chunks", "16", "--threads", "1"]) == 0
    found = load(tmp_path / "m.gguf").entries
    expected = load(GOLDEN / "imatrix" / f"{case}.imatrix.gguf").entries
    # Without --nextn, llama-imatrix leaves out MTP layers.
    assert found.keys() - expected.keys() == {name for name in found if name.startswith(MTP.get(case, "-"))}
    assert expected.keys() <= found.keys()
    errors = []
    for name, entry in expected.items():
        mine = found[name]
        assert mine.values.shape == entry.values.shape
        error = np.abs(mine.values - entry.values)
        assert np.linalg.norm(error) < 0.01 * np.linalg.norm(entry.values), name
        errors.append((error / entry.values).reshape(-1))
        # where two experts score nearly alike, a token may go to the other one
        assert np.abs(mine.counts - entry.counts).max() <= (3 if "_exps" in name else 0), name
    assert np.median(np.concatenate(errors)) < MEDIAN.get(case, 1e-3)
