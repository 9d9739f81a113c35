"""Layers are put together from parts: run_layer knows neither the attention nor the block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_tools.errors import BadActivation, UnsupportedCheckpoint
from tests.imatrix.forward.observers import NaiveSums

torch = pytest.importorskip("torch")

from imatrix.forward.families import find_family  # noqa: E402
from imatrix.forward.hidden_states import MemoryStates  # noqa: E402
from imatrix.forward.layer import Layer  # noqa: E402
from imatrix.forward.layers.ffn import BlockNames, FeedForward  # noqa: E402
from imatrix.forward.layers.residual import RMSNorm  # noqa: E402
from imatrix.forward.observe import Observer, Silent  # noqa: E402
from imatrix.forward.sweep import Execution, LayerBuffers, Sweep, run_layer  # noqa: E402
from imatrix.texts.tokens import Text  # noqa: E402

HIDDEN, WIDTH, CHUNK, N_CHUNKS = 8, 12, 5, 3
TEXT = Text(*2 * (np.zeros((N_CHUNKS, CHUNK), np.int64),))


@dataclass(frozen=True)
class MeanAttention:
    """An attention that looks at all tokens so far alike, and multiplies their mean by a matrix."""

    matrix: torch.Tensor

    def __call__(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        mean = hidden.cumsum(0) / torch.arange(1, len(hidden) + 1)[:, None]
        observer.rows(("blk.0.attn_mean.weight",), mean)
        return mean @ self.matrix.T

    def work(self, n_tokens: int) -> int:
        return n_tokens * HIDDEN


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(list(shape)).standard_normal(shape).astype(np.float32)


def make_layer(number: int) -> Layer:
    gate, up, down = random(WIDTH, HIDDEN), random(WIDTH, HIDDEN) + 1, random(HIDDEN, WIDTH)
    block = FeedForward(BlockNames.of(number), *map(torch.from_numpy, (gate, up, down)))
    norm = RMSNorm(torch.ones(HIDDEN), 1e-6)
    return Layer(f"blk.{number}", MeanAttention(torch.from_numpy(random(HIDDEN, HIDDEN))), norm, block, None)


def compute(before: np.ndarray, observer: Any, **changes: Any) -> tuple[np.ndarray, list[float]]:
    """Return the layer's output, and the shares of the work that were reported."""
    shares: list[float] = []
    sweep = Sweep(
        build=make_layer, device=torch.device("cpu"), dtype=torch.float32, chunks=TEXT.chunks,
        all_experts=False,
    )  # fmt: skip
    states, middle, after = (MemoryStates(N_CHUNKS * CHUNK, HIDDEN) for _ in range(3))
    states.write(0, torch.from_numpy(before))
    execution = Execution(advance=shares.append, **changes)
    run_layer(sweep, execution, 0, LayerBuffers(states, middle, after), observer)
    return after.read(0, N_CHUNKS * CHUNK).numpy(), shares


@pytest.mark.parametrize("n_workers", [1, 3])
def test_a_layer_of_other_parts(n_workers: int) -> None:
    before, observer = random(N_CHUNKS * CHUNK, HIDDEN), NaiveSums()
    found, shares = compute(before, observer, n_workers=n_workers)
    layer: Any = make_layer(0)
    gate, up, down = (part.double().numpy() for part in (layer.block.gate, layer.block.up, layer.block.down))
    means, inners = [], []
    for start in range(0, N_CHUNKS * CHUNK, CHUNK):
        chunk = before[start : start + CHUNK].astype(np.float64)
        mean = np.array([chunk[: at + 1].mean(0) for at in range(CHUNK)])
        hidden = chunk + mean @ layer.attention.matrix.double().numpy().T
        x = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6)
        inner = (x @ gate.T) / (1 + np.exp(-(x @ gate.T))) * (x @ up.T)
        expected = hidden + inner @ down.T
        np.testing.assert_allclose(found[start : start + CHUNK], expected, rtol=1e-4, atol=1e-4)
        means.append(mean)
        inners.append(inner)
    for name, rows in (("attn_mean", means), ("ffn_down", inners)):
        sums = observer.sums[f"blk.0.{name}.weight"]
        np.testing.assert_allclose(sums.squares[0], (np.concatenate(rows) ** 2).sum(0), rtol=1e-5)
        assert sums.counts.tolist() == [N_CHUNKS * CHUNK]
    assert sum(shares) == pytest.approx(1)


def test_nobody_needs_to_observe() -> None:
    before = random(N_CHUNKS * CHUNK, HIDDEN)
    np.testing.assert_array_equal(compute(before, Silent())[0], compute(before, NaiveSums())[0])
    assert Silent().arrays() == {}


def test_infinity_names_the_tensor_also_when_nobody_observes() -> None:
    before = random(N_CHUNKS * CHUNK, HIDDEN)
    before[7, 3] = np.inf
    with pytest.raises(BadActivation, match=r"blk\.0\.attn_output\.weight: the hidden states after it"):
        compute(before, Silent())


@pytest.mark.parametrize("name", ["bloom", None, 3])
def test_another_family_is_refused(name: object) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"m\.gguf: .* is .*, expected .deepseek2."):
        find_family(Path("m.gguf"), name)


def test_a_vision_tower_is_told_from_other_architectures() -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"m\.gguf: a vision tower.* text part"):
        find_family(Path("m.gguf"), "clip")
