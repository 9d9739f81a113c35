"""A sketch finds what two texts share, keeps a bounded number of hashes, and survives a file."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_tools.format.values import Value
from quantize.importances import text_sketch
from quantize.importances.text_sketch import (
    MAX_HASHES,
    PASSAGE,
    SHA256_KEY,
    SKETCH_KEY,
    WINDOW_KEY,
    TextSketch,
    hash_passages,
)  # fmt: skip

Tokens = npt.NDArray[np.int64]


def random_text(seed: int, n_tokens: int, vocab_size: int = 50_000) -> Tokens:
    return np.random.default_rng(seed).integers(0, vocab_size, n_tokens)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    n_known=st.integers(0, 900),
    n_other=st.integers(0, 300),
    where=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    most=st.sampled_from([8, 20, 64, 4096]),
)
def test_a_long_enough_shared_passage_is_always_found(
    seed: int, n_known: int, n_other: int, where: tuple[float, float], most: int
) -> None:
    known, other = random_text(seed, n_known), random_text(seed + 1, n_other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_sketch, "MAX_HASHES", most)
        passage, longer, sketch = random_text(seed + 2, PASSAGE), known, TextSketch.of(known, "")
        while len(passage) < PASSAGE + sketch.window - 1 or longer is known:
            passage = random_text(seed + 2, PASSAGE + sketch.window - 1)
            longer = np.insert(known, int(where[0] * n_known), passage)
            sketch = TextSketch.of(longer, "")  # whose window depends on the passage's length
    mixed = np.insert(other, int(where[1] * n_other), passage)
    assert sketch.shared(mixed) > 0
    assert sketch.shared(other) == 0


def test_a_passage_has_the_same_hash_wherever_it_is() -> None:
    text = random_text(1, 400)
    hashes = hash_passages(text)
    assert len(hashes) == 400 - PASSAGE + 1
    for start in (0, 17, 350):
        assert hash_passages(text[start : start + PASSAGE]).tolist() == [hashes[start]]
    changed = text.copy()
    changed[100] += 1
    differs = np.flatnonzero(hash_passages(changed) != hashes)
    assert differs.tolist() == list(range(100 - PASSAGE + 1, 101))


def test_the_smallest_of_every_window_is_kept() -> None:
    text = random_text(2, 9000)
    sketch = TextSketch.of(text, "")
    hashes = hash_passages(text)
    windows = np.lib.stride_tricks.sliding_window_view(hashes, sketch.window)
    assert sketch.window > 2
    assert sketch.hashes.tolist() == np.unique(windows.min(axis=1)).tolist()


@pytest.mark.parametrize("n_tokens", [0, 49, 50, 5_000, 400_000])
def test_a_sketch_is_bounded(n_tokens: int) -> None:
    sketch = TextSketch.of(random_text(3, n_tokens), "")
    n_passages = max(0, n_tokens - PASSAGE + 1)
    assert min(n_passages, MAX_HASHES) * 0.6 <= len(sketch.hashes) <= MAX_HASHES * 1.1
    assert len(sketch.hashes) <= n_passages


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_shares_are_estimated(share: float) -> None:
    known, other = random_text(4, 200_000), random_text(5, 30_000)
    n = int(share * len(other))
    other[:n] = known[70_000 : 70_000 + n]
    assert TextSketch.of(known, "").shared(other) == pytest.approx(share, rel=0.15)


def test_a_joined_sketch_knows_both_texts() -> None:
    short, long = random_text(8, 2_000), random_text(9, 200_000)
    joined = TextSketch.of(short, "ab").joined(TextSketch.of(long, "cd"))
    assert joined.sha256 == "ab"
    assert joined.shared(long) == pytest.approx(1, rel=0.15)
    shared_tokens = PASSAGE + joined.window - 1
    assert joined.shared(short[:shared_tokens]) > 0
    assert joined.shared(long[-shared_tokens:]) > 0
    assert joined.shared(random_text(10, 2_000)) == 0


def test_a_sketch_survives_a_file() -> None:
    sketch = TextSketch.of(random_text(6, 20_000), "ab12")
    read = TextSketch.read(sketch.metadata())
    assert read is not None
    assert read.hashes.tolist() == sketch.hashes.tolist()
    assert (read.window, read.sha256) == (sketch.window, "ab12")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (SKETCH_KEY, None), (SKETCH_KEY, Value.string("x")), (SKETCH_KEY, Value.u32s([1])),
        (WINDOW_KEY, None), (WINDOW_KEY, Value.u32(0)), (WINDOW_KEY, Value.string("x")),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_no_sketch(key: str, value: Value | None) -> None:
    metadata = dict(TextSketch.of(random_text(7, 100), "").metadata())
    metadata.pop(key)
    assert TextSketch.read(metadata if value is None else {**metadata, key: value}) is None


def test_the_digest_of_the_text_may_be_missing() -> None:
    metadata = {**TextSketch.of(random_text(7, 100), "").metadata(), SHA256_KEY: Value.u32(3)}
    sketch = TextSketch.read(metadata)
    assert sketch is not None
    assert sketch.sha256 == ""
