"""Chunks of any lengths: which tokens are scored, and texts that are joined."""

from __future__ import annotations

import numpy as np
import pytest

from imatrix.texts.chunks import Chunks
from imatrix.texts.tokens import Text

SIZES = (7, 30, 1, 16)


def ragged(*sizes: int, seed: int = 0) -> Chunks:
    """Return chunks of some lengths in which about half of the tokens are scored."""
    rng, bounds = np.random.default_rng(seed), np.cumsum([0, *sizes])
    tokens = rng.integers(0, 300, bounds[-1])
    scored = rng.random(bounds[-1]) < 0.5
    scored[bounds[:-1]] = False
    inputs = tokens.copy()
    inputs[bounds[:-1]] = 1
    return Chunks(tokens, inputs, bounds, scored)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_the_second_half_of_a_uniform_chunk_is_scored(size: int) -> None:
    tokens = np.arange(3 * size).reshape(3, size)
    chunks = Text(tokens, tokens).chunks
    assert [chunks.rows(number) for number in range(3)] == [(n * size, (n + 1) * size) for n in range(3)]
    wanted = [position - 1 >= size // 2 for position in range(size)] * 3  # by which its prediction is made
    assert chunks.scored.tolist() == wanted
    assert chunks.longest == size


def test_joined_texts_stay_parts() -> None:
    one, other = ragged(*SIZES), ragged(5, 6, seed=1)
    joined = Chunks.joined([one, Chunks.joined([other, one])])
    assert joined.starts == (0, 4, 6)
    assert joined.part_bounds.tolist() == [0, one.n_tokens, one.n_tokens + 11, 2 * one.n_tokens + 11]
    assert np.diff(joined.bounds).tolist() == [*SIZES, 5, 6, *SIZES]
    for part, chunks in zip((one, other, one), joined.parts, strict=True):
        first, stop = int(joined.bounds[chunks.start]), int(joined.bounds[chunks.stop])
        for name in ("tokens", "inputs", "scored"):
            assert getattr(joined, name)[first:stop].tolist() == getattr(part, name).tolist()
    numbers = np.arange(joined.n_tokens)
    assert np.bincount(joined.chunk_of(numbers)).tolist() == np.diff(joined.bounds).tolist()


def test_a_digest_tells_all_that_decides_the_numbers() -> None:
    chunks = ragged(*SIZES)
    cut_otherwise = Chunks(chunks.tokens, chunks.inputs, np.array([0, 9, 54]), chunks.scored)
    scored = Chunks(chunks.tokens, chunks.inputs, chunks.bounds, np.zeros_like(chunks.scored))
    twice = Chunks.joined([chunks, chunks]), Chunks.joined([Chunks.joined([chunks, chunks])])
    digests = {each.digest() for each in (chunks, cut_otherwise, scored, *twice)}
    assert len(digests) == 4
    assert twice[0].digest() == twice[1].digest()
