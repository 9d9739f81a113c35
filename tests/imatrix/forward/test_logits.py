"""Logits in slices: visitors see every token of every chunk once, and two models side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_tools.errors import BadRequest

torch = pytest.importorskip("torch")

from gguf_tools.format.ggml_types import F32  # noqa: E402
from imatrix.forward import logits  # noqa: E402
from imatrix.forward.hidden_states import MemoryStates  # noqa: E402
from imatrix.forward.layers.load import Loader  # noqa: E402
from imatrix.forward.layers.residual import RMSNorm  # noqa: E402
from imatrix.forward.logits import Head, Perplexity, Positions, measure, sweep_vocabulary  # noqa: E402  # noqa: E402
from imatrix.texts.tokens import Text  # noqa: E402

N_CHUNKS, CHUNK, HIDDEN, VOCAB = 3, 16, 24, 100


class Matrix:
    """A tensor in memory, as sources of weights are."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows, self.shape, self.type = rows, rows.shape, F32

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.rows[start:stop]


def make_head(seed: int, n_vocab: int = VOCAB, scale: float = 1.0) -> Head:
    """Return the end of a model with random weights and hidden states."""
    rng = np.random.default_rng(seed)
    matrix: Any = Matrix((scale * rng.standard_normal((n_vocab, HIDDEN))).astype(np.float32))
    load = Loader(Path(f"{seed}.gguf"), {"output.weight": matrix}, torch.device("cpu"), torch.float32)
    states = MemoryStates(N_CHUNKS * CHUNK, HIDDEN)
    states.write(0, torch.from_numpy(rng.standard_normal((N_CHUNKS * CHUNK, HIDDEN)).astype(np.float32)))
    return Head(load, states, RMSNorm(torch.ones(HIDDEN), 1e-6), "output.weight")


def positions_of(first: int, stop: int) -> Positions:
    """Return some positions of every chunk."""
    tokens = np.arange(N_CHUNKS * CHUNK)
    chunks = Text(tokens.reshape(N_CHUNKS, CHUNK), tokens.reshape(N_CHUNKS, CHUNK)).chunks
    return Positions.of(chunks, tokens[(tokens % CHUNK >= first) & (tokens % CHUNK < stop)])


def all_logits(head: Head) -> np.ndarray:
    """Return the logits of the whole text at once, float64 (n_chunks, chunk_size, n_vocab)."""
    hidden = head.states.read(0, N_CHUNKS * CHUNK).double()
    hidden = hidden / (hidden.square().mean(-1, keepdim=True) + head.norm.eps).sqrt()
    matrix: Any = head.load.tensors[head.matrix]
    return (hidden.numpy() @ matrix.rows.T.astype(np.float64)).reshape(N_CHUNKS, CHUNK, -1)


def log_softmax(values: np.ndarray) -> np.ndarray:
    values = values - values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


@pytest.fixture(params=[7, 50, 64, 100, 8192])
def slice_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Slices that divide the vocabulary, that don't, and one that is larger."""
    monkeypatch.setattr(logits, "SLICE_ROWS", request.param)
    n_rows: int = request.param
    return n_rows


class Divergence:
    """A visitor of two models: the mean of KL(first || second), from one pass with a running maximum.

    Let m and n be the maxima of the logits a and b. Three sums over the vocabulary are enough: of e^(a-m), of
    e^(b-n), and of e^(a-m) (a - b). KL is the third over the first, minus the logarithm of the first, plus
    that of the second, minus m, plus n.
    """

    def __init__(self, positions: Positions) -> None:
        self.positions, n_positions = positions, len(positions.tokens)
        self.maxima = np.full((2, n_positions), -np.inf)
        self.sums = np.zeros((3, n_positions))
        self.by_chunk: list[np.ndarray] = []

    def visit(self, at: slice, first: int, logits: Sequence[Any]) -> None:
        a, b = (one.double().numpy() for one in logits)
        m, n = (
            np.maximum(old, new.max(-1))
            for old, new in zip(self.maxima[:, at], (a, b), strict=True)
        )  # fmt: skip
        shrunk_a, shrunk_b = np.exp(self.maxima[:, at] - (m, n))
        self.maxima[:, at] = m, n
        weights = np.exp(a - m[:, None])
        of_slice = weights.sum(-1), np.exp(b - n[:, None]).sum(-1), (weights * (a - b)).sum(-1)
        self.sums[:, at] = self.sums[:, at] * (shrunk_a, shrunk_b, shrunk_a) + of_slice

    def finish_chunk(self, chunk: int) -> None:
        at = self.positions.place(chunk)
        of_a, of_b, of_both = self.sums[:, at]
        m, n = self.maxima[:, at]
        self.by_chunk.append(of_both / of_a - np.log(of_a) + np.log(of_b) - m + n)


@pytest.mark.parametrize("n_workers", [1, 3])
@pytest.mark.usefixtures("slice_rows")
def test_a_divergence_of_two_models_is_a_visitor(n_workers: int) -> None:
    heads = [make_head(1, scale=3), make_head(2, scale=0.5)]
    positions = positions_of(4, CHUNK)
    visitor = Divergence(positions)
    sweep_vocabulary(heads, positions, [visitor], n_workers)
    a, b = (log_softmax(all_logits(head)[:, 4:]) for head in heads)
    expected = (np.exp(a) * (a - b)).sum(-1)
    np.testing.assert_allclose(np.array(visitor.by_chunk), expected, rtol=1e-4)


@pytest.mark.usefixtures("slice_rows")
def test_a_model_diverges_from_itself_by_nothing() -> None:
    positions = positions_of(0, CHUNK)
    visitor = Divergence(positions)
    sweep_vocabulary([make_head(1), make_head(1)], positions, [visitor])
    np.testing.assert_allclose(np.array(visitor.by_chunk), 0, atol=1e-12)


class Recorder:
    """A visitor that keeps all it is shown, by the piece of a chunk."""

    def __init__(self, positions: Positions) -> None:
        self.positions = positions
        self.slices: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = {}
        self.finished: list[int] = []

    def visit(self, at: slice, first: int, logits: Sequence[Any]) -> None:
        self.slices.setdefault((at.start, at.stop), []).append((first, logits[0].numpy()))

    def finish_chunk(self, chunk: int) -> None:
        for at in self.positions.pieces(chunk):
            assert sum(part.shape[1] for _, part in self.slices[at.start, at.stop]) == VOCAB
        self.finished.append(chunk)


@pytest.mark.parametrize("n_positions", [4, 512])
def test_all_visitors_see_the_whole_vocabulary_in_order(
    n_positions: int, slice_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "PIECE_POSITIONS", n_positions)
    head, positions = make_head(5), positions_of(3, CHUNK - 2)
    recorders = [Recorder(positions), Recorder(positions)]
    sweep_vocabulary([head], positions, recorders, n_workers=2)
    expected = all_logits(head)[:, 3 : CHUNK - 2].reshape(-1, VOCAB)
    for recorder in recorders:
        assert recorder.finished == list(range(N_CHUNKS))
        places = sorted(recorder.slices)
        assert [start for start, _ in places] == [0, *(stop for _, stop in places[:-1])]
        assert max(stop - start for start, stop in places) == min(n_positions, CHUNK - 5)
        for (start, stop), slices in recorder.slices.items():
            assert [first for first, _ in slices] == list(range(0, VOCAB, slice_rows))
            whole = np.concatenate([part for _, part in slices], axis=1)
            np.testing.assert_allclose(whole, expected[start:stop], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.usefixtures("slice_rows")
def test_perplexity(n_workers: int) -> None:
    head = make_head(3)
    tokens = np.random.default_rng(4).integers(0, VOCAB, (N_CHUNKS, CHUNK))
    running: list[float] = []

    def report(perplexity: Perplexity) -> None:
        running.append(perplexity.value)

    perplexity = measure(head, Text(tokens, tokens).chunks, report, n_workers)
    logs = log_softmax(all_logits(head))
    losses = np.array(
        [
            [-logs[chunk, at, tokens[chunk, at + 1]] for at in range(CHUNK // 2, CHUNK - 1)]
            for chunk in range(N_CHUNKS)
        ]
    )
    assert perplexity.value == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    assert running == perplexity.by_chunk
    assert running[0] == pytest.approx(math.exp(losses[0].mean()), rel=1e-5)
    standard_error = losses.std() / math.sqrt(losses.size - 1)
    assert perplexity.error == pytest.approx(standard_error * perplexity.value, rel=1e-4)


def test_a_chunk_without_predictions_has_no_perplexity() -> None:
    tokens = np.zeros((N_CHUNKS * CHUNK, 1), np.int64)
    perplexity = measure(make_head(3), Text(tokens, tokens).chunks, lambda running: None)
    assert perplexity.count == 0
    assert math.isnan(perplexity.value)


def test_vocabularies_of_different_sizes_are_refused() -> None:
    heads = [make_head(1), make_head(2, n_vocab=VOCAB + 1)]
    with pytest.raises(BadRequest, match=r"1\.gguf has 100, 2\.gguf has 101 tokens"):
        sweep_vocabulary(heads, positions_of(0, CHUNK), [])
