"""Peak memory is that of one layer of one model, however many layers and models there are."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import convert
from tests.support.checkpoints import micro_checkpoint
from tests.support.memory import high_water
from tests.support.tokenizer_files import copy_tokenizer

pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
SIZES = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 512,
    "n_routed_experts": 8, "max_position_embeddings": 256,
}  # fmt: skip
MOE_LAYER_BYTES = 4 * 3 * 9 * 512 * 256
"""A layer's experts and shared expert in float32."""


def peak_bytes(base: Path, quants: list[Path], text: Path) -> int:
    """Return the largest resident memory of a whole command."""
    words = [
        sys.executable,
        "-m",
        "gguf_tools",
        "evaluate",
        str(base),
        *map(str, quants),
        "-f",
        str(text),
    ]
    words += ["-c", "64", "--chunks", "4", "--threads", "1", "--memory", "0"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, high_water(process.pid))
            time.sleep(0.005)
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read().decode()
    return peak


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_more_layers_and_models_take_the_same_memory(text: Path, tmp_path: Path) -> None:
    peaks = []
    for n_layers, n_quants in ((4, 1), (24, 3)):
        folder = micro_checkpoint(tmp_path / str(n_layers), "v3", **SIZES, num_hidden_layers=n_layers)
        copy_tokenizer("tiny", folder)
        quant = tmp_path / f"{n_layers}.gguf"
        convert.convert(folder, quant, outtype="q8_0")
        peaks.append(peak_bytes(folder, n_quants * [quant], text))
    # 20 layers more of four models would be 1.1 GB
    assert peaks[1] - peaks[0] < 2 * MOE_LAYER_BYTES, peaks
