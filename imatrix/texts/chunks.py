"""Chunks of tokens of any lengths: what a model reads, each chunk on its own, and which predictions count."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks of tokens of any lengths, one after the other; a model reads each on its own.

    tokens  int64 (n_tokens,), as they are in the text
    inputs  int64 (n_tokens,), the same, but BOS is each chunk's first token if the tokenizer adds one
    bounds  int64 (n_chunks + 1,): chunk i is tokens bounds[i] to bounds[i + 1]
    scored  bool (n_tokens,): whether the prediction of this token, from those before it in its chunk, is
            measured; never a chunk's first
    starts  number of the first chunk of each part. A part's numbers do not depend on what else is there
    """

    tokens: Ints
    inputs: Ints
    bounds: Ints
    scored: npt.NDArray[np.bool_]
    starts: tuple[int, ...] = (0,)

    @classmethod
    def joined(cls, parts: Sequence[Chunks]) -> Self:
        """Put several texts one after the other; each stays a part."""
        sizes = np.concatenate([np.diff(part.bounds) for part in parts])
        n_before = accumulate((part.n_chunks for part in parts[:-1]), initial=0)
        return cls(
            tokens=np.concatenate([part.tokens for part in parts]),
            inputs=np.concatenate([part.inputs for part in parts]),
            bounds=np.concatenate([[0], np.cumsum(sizes)]),
            scored=np.concatenate([part.scored for part in parts]),
            starts=tuple(n + start for n, part in zip(n_before, parts, strict=True) for start in part.starts),
        )

    @property
    def n_tokens(self) -> int:
        return len(self.inputs)

    @property
    def n_chunks(self) -> int:
        return len(self.bounds) - 1

    @property
    def n_scored(self) -> int:
        return int(self.scored.sum())

    @property
    def longest(self) -> int:
        """Number of tokens of the longest chunk."""
        return int(np.diff(self.bounds).max())

    def rows(self, chunk: int) -> tuple[int, int]:
        """Return a chunk's range of tokens."""
        return int(self.bounds[chunk]), int(self.bounds[chunk + 1])

    def chunk_of(self, tokens: Ints) -> Ints:
        """Find the chunk that each token is in, by the tokens' numbers."""
        return np.searchsorted(self.bounds, tokens, side="right") - 1

    @property
    def parts(self) -> tuple[range, ...]:
        """The chunks of each part."""
        return tuple(range(first, stop) for first, stop in pairwise((*self.starts, self.n_chunks)))

    @property
    def part_bounds(self) -> Ints:
        """Tokens at which parts begin, and the end of the last one; int64 (n_parts + 1,)."""
        return self.bounds[[*self.starts, self.n_chunks]]

    def digest(self) -> str:
        """Compute a SHA-256 of all that decides a model's numbers."""
        digest = hashlib.sha256()
        for values in (self.inputs, self.bounds, self.scored, np.array(self.starts)):
            digest.update(values.tobytes())
        return digest.hexdigest()
