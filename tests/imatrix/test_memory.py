"""Peak memory is that of one layer, however many there are."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.checkpoints import micro_checkpoint
from tests.support.memory import high_water
from tests.support.tokenizer_files import copy_tokenizer

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
SIZES = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 512,
    "n_routed_experts": 8, "max_position_embeddings": 256,
}  # fmt: skip
MOE_LAYER_BYTES = 4 * 3 * 9 * 512 * 256
"""A layer's experts and shared expert in float32."""


def peak_bytes(model: Path, text: Path, out: Path, *options: str) -> int:
    """Return the largest resident memory of a whole command."""
    words = [
        sys.executable,
        "-m",
        "gguf_tools",
        "imatrix",
        "-m",
        str(model),
        "-f",
        str(text),
        "-o",
        str(out),
    ]
    words += ["-c", "64", "--chunks", "4", "--threads", "1", *options]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, high_water(process.pid))
            time.sleep(0.005)
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read().decode()
    return peak


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="in memory", marks=pytest.mark.slow),
        pytest.param(("--memory", "0"), id="in a file", marks=pytest.mark.slow),
    ],
)
def test_ten_times_the_layers_take_the_same_memory(
    options: tuple[str, ...], calibration: Path, tmp_path: Path
) -> None:
    peaks = []
    for n_layers in (4, 40):
        folder = micro_checkpoint(tmp_path / str(n_layers), "v3", **SIZES, num_hidden_layers=n_layers)
        copy_tokenizer("tiny", folder)
        peaks.append(peak_bytes(folder, calibration, tmp_path / f"{n_layers}.gguf", *options))
    # 36 layers more would be 510 MB; what importances and headers take, and noise, is below two layers
    assert peaks[1] - peaks[0] < 2 * MOE_LAYER_BYTES, peaks
