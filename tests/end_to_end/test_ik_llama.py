"""ik_llama.cpp loads a file of its own types that we wrote, and computes what we compute from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_logits_agree() -> None:
    pytest.importorskip("ik_llama_cpp")
    pytest.importorskip("torch")
    command = [sys.executable, str(ROOT / "scripts" / "check" / "ik_llama.py"), "--threads", "1"]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert "types: BF16, F32, IQ2_KT, IQ3_K, IQ4_KS" in run.stdout
