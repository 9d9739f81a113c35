"""How much memory a calibration is said to take, from shapes alone."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import convert
from gguf_tools.format.ggml_types import Q4_K
from gguf_tools.format.tensors import TensorInfo
from imatrix.calibrate.estimate import memory_bytes
from imatrix.calibrate.options import CalibrationOptions
from imatrix.calibrate.shapes import Shapes
from imatrix.calibrate.statistics.gradients import chunks_at_once
from imatrix.calibrate.statistics.inputs import PAIR_BYTES
from imatrix.forward.layers.rope import Rope
from imatrix.forward.network import Network
from imatrix.forward.options import ForwardOptions
from imatrix.texts.tokens import Text
from tests.support.memory import high_water

GB = 1 << 30
HIDDEN, DENSE, EXPERT, HEADS = 7168, 18432, 2048, 128


def of_v3(n_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the matrices of DeepSeek-V3 as its GGUF files have them, cut off after some layers."""
    for layer in range(n_layers):
        shapes: dict[str, tuple[int, ...]] = {
            "attn_q_a": (1536, HIDDEN), "attn_q_b": (192 * HEADS, 1536), "attn_kv_a_mqa": (576, HIDDEN),
            "attn_k_b": (HEADS, 512, 128), "attn_v_b": (HEADS, 128, 512),
            "attn_output": (HIDDEN, 128 * HEADS),
        }  # fmt: skip
        if layer < 3:
            shapes |= {"ffn_gate": (DENSE, HIDDEN), "ffn_up": (DENSE, HIDDEN), "ffn_down": (HIDDEN, DENSE)}
        else:
            for kind, stack in (("exps", (256,)), ("shexp", ())):
                shapes |= {f"ffn_{part}_{kind}": (*stack, EXPERT, HIDDEN) for part in ("gate", "up")}
                shapes[f"ffn_down_{kind}"] = (*stack, HIDDEN, EXPERT)
        yield from ((f"blk.{layer}.{name}.weight", shape) for name, shape in shapes.items())


@pytest.fixture
def shapes() -> Shapes:
    infos = [TensorInfo(name, shape, Q4_K) for name, shape in of_v3(4)]

    def unread(*_: object) -> None:
        raise AssertionError("no weight is read")

    network = Network(4, HIDDEN, 129280, "output.weight", 1e-6, Rope(64, 1e4), unread)  # type: ignore[arg-type]
    return Shapes(network, infos, infos, n_used=8, n_heads=HEADS)


def text_of(n_chunks: int) -> Text:
    tokens = np.zeros((n_chunks, 512), np.int64)
    return Text(tokens, tokens)


def test_the_largest_model_takes_less_than_12_gigabytes(shapes: Shapes) -> None:
    choices = CalibrationOptions("text", forward=ForwardOptions(memory_bytes=0))
    whole = memory_bytes(choices, shapes, text_of(165), 2)
    assert PAIR_BYTES * DENSE**2 < whole < 12 * GB
    plain = replace(choices, method="one-sided", embedding=False)
    assert memory_bytes(plain, shapes, text_of(165), 2) < whole
    assert memory_bytes(replace(plain, sequential=False), shapes, text_of(165), 2) <= whole
    assert whole < memory_bytes(choices, shapes, text_of(165), 16) < 16 * GB


def test_chunks_that_are_large_are_few(shapes: Shapes) -> None:
    assert [chunks_at_once(shapes, 512, n_threads) for n_threads in (1, 2, 16, 64)] == [2, 2, 4, 17]
    assert chunks_at_once(shapes, 64, 64) > 17
    small = replace(shapes, infos=[TensorInfo("blk.0.attn_output.weight", (512, 512), Q4_K)], n_heads=4)
    assert [chunks_at_once(small, 512, n_threads) for n_threads in (1, 2, 64)] == [2, 3, 65]


def test_states_count_while_they_fit_into_the_budget(shapes: Shapes) -> None:
    def with_budget(memory: int) -> int:
        return memory_bytes(
            CalibrationOptions("text", forward=ForwardOptions(memory_bytes=memory)), shapes, text_of(8), 2
        )

    states = 2 * 8 * 512 * HIDDEN * 12
    assert with_budget(states) == with_budget(0) + states
    assert with_budget(states // 4) == with_budget(0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_run_takes_no_more_than_its_dry_run_says(tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    convert.convert(tiny_folder, tmp_path / "model.gguf", outtype="f32")
    words = [sys.executable, "-m", "quantize", "--calibrate", str(text), "-c", "128", "--chunks", "16"]
    rest = [str(tmp_path / "model.gguf"), str(tmp_path / "out.gguf"), "Q4_K_M", "2"]
    told = subprocess.run([*words, "--dry-run", *rest], check=True, capture_output=True, text=True).stdout
    match = re.search(r"memory  about ([0-9.]+) (M|G)iB", told)
    assert match is not None, told
    promised = float(match[1]) * (GB if match[2] == "G" else 1 << 20)
    peak = 0
    with subprocess.Popen([*words, *rest], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        while run.poll() is None:
            peak = max(peak, high_water(run.pid))
            time.sleep(0.05)
    assert run.returncode == 0
    assert 0.4 * promised < peak < promised
