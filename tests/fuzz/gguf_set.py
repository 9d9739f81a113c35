"""Split sets: two files, one or both of them strange."""

from __future__ import annotations

import random

from tests.fuzz import mutate, scratch
from tests.fuzz.gguf import read
from tests.hostile.fields import head, number, tensor, word

FIRST = (
    *head(1, 5),
    *word("general.architecture", "x"),
    *number("x.block_count", 2),
    *number("split.no", 0),
    *number("split.count", 2),
    *number("split.tensors.count", 2),
    *tensor("a", (8,)),
    bytes(96),
)
SECOND = (
    *head(1, 3),
    *number("split.no", 1),
    *number("split.count", 2),
    *number("split.tensors.count", 2),
    *tensor("b", (8,)),
    bytes(96),
)
_BETWEEN = b"\0BETWEEN\0"


def make(rng: random.Random) -> bytes:
    """Return both files, one of them changed, with a mark between them."""
    if rng.random() < 0.5:
        return mutate.segments(rng, FIRST, SECOND) + _BETWEEN + b"".join(SECOND)
    return b"".join(FIRST) + _BETWEEN + mutate.segments(rng, SECOND, FIRST)


def warm_up() -> None:
    one_input(b"".join(FIRST) + _BETWEEN + b"".join(SECOND))


def one_input(data: bytes) -> None:
    folder = scratch.folder("gguf_set")
    first, _, second = data.partition(_BETWEEN)
    (folder / "m-00001-of-00002.gguf").write_bytes(first)
    (folder / "m-00002-of-00002.gguf").write_bytes(second)
    read(folder / "m-00002-of-00002.gguf")
