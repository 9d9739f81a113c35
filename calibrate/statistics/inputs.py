"""Inputs of matrices over the whole text: their second moments, and a hold-out split.

Held-out chunks contribute to no sum. They are used to test whether calibration improved a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from calibrate.statistics.moments import Moments, Statistics
from forward.device import to_cpu
from forward.workers import Workers

PIECE_ROWS = 2048
"""Rows of a piece, about: with fewer, matrix products are slower, and these of 65536 columns take 0.5 GB."""

HELD_ROWS = 512
"""Most held-out rows of a matrix. With more, comparing encodings takes longer than encoding."""

Activations = Mapping[tuple[str, ...], torch.Tensor]
"""Inputs of matrices, (n_rows, n_mats, n_cols), by the names of all that have the same input."""


@dataclass(frozen=True)
class Held:
    """Held-out rows of one matrix.

    x          float32 (n_rows, n_cols), on the CPU
    originals  the inputs of the original's matrix; the same object where they are x
    """

    x: torch.Tensor
    originals: torch.Tensor


@dataclass(frozen=True)
class HoldoutSplit:
    """Which chunks of a text are summed up, and which are held out.

    held  numbers of the held-out chunks; a single chunk is in both parts
    """

    n_chunks: int
    chunk_size: int
    held: tuple[int, ...]

    @classmethod
    def of(cls, n_chunks: int, chunk_size: int) -> HoldoutSplit:
        """Hold out one chunk of eight, evenly spread, 8 at most."""
        n_held = min(8, max(1, n_chunks // 8))
        step = n_chunks / n_held
        return cls(n_chunks, chunk_size, tuple(int((number + 0.5) * step) for number in range(n_held)))

    def is_summed(self, chunk: int) -> bool:
        return chunk not in self.held or self.n_chunks == 1

    @property
    def n_summed(self) -> int:
        """Tokens that are summed up."""
        return self.chunk_size * sum(map(self.is_summed, range(self.n_chunks)))

    def batches(self) -> Iterable[range]:
        """Yield the chunks whose rows make a piece."""
        step = max(1, PIECE_ROWS // self.chunk_size)
        for start in range(0, self.n_chunks, step):
            yield range(start, min(start + step, self.n_chunks))

    def summed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return which of these token numbers are in chunks that are summed up, bool."""
        return ~self.held_tokens(tokens) if self.n_chunks > 1 else torch.ones(len(tokens), dtype=torch.bool)

    def held_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return which of these token numbers are in held-out chunks, bool."""
        return torch.isin(tokens // self.chunk_size, torch.tensor(self.held))


@dataclass
class Inputs:
    """The inputs of some matrices.

    crossed  whether the original's inputs differ
    moments  by the names of all matrices that have the same input
    """

    crossed: bool
    moments: dict[tuple[str, ...], Moments] = field(default_factory=dict)
    _held: dict[tuple[str, ...], list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def add(self, shown: Sequence[Activations], workers: Workers) -> None:
        """Add rows to the sums; `shown` by each model, the original first."""
        originals, own = shown[0], shown[-1]
        for names, x in own.items():
            moments = self.moments.get(names)
            if moments is None:
                n_mats, n_cols = x.shape[1:]
                moments = Moments.zeros(n_mats, n_cols, x.device, cross=self.crossed)
                self.moments[names] = moments
            moments.add(x, originals[names] if self.crossed else None, workers)

    def hold(self, shown: Sequence[Activations]) -> None:
        """Keep held-out rows."""
        for names, x in shown[-1].items():
            mine = to_cpu(x.float())
            other = to_cpu(shown[0][names].float()) if self.crossed else mine
            self._held.setdefault(names, []).append((mine, other))

    def statistics(self, names: tuple[str, ...], mat: int = 0) -> Statistics:
        return Statistics.of(self.moments[names], mat)

    def held(self, names: tuple[str, ...], mat: int = 0) -> Held | None:
        """Return the held-out rows of a matrix; None if there are none."""
        pieces = self._held.get(names, [])
        if not sum(len(x) for x, _ in pieces):
            return None
        x = torch.cat([x[:, mat] for x, _ in pieces])
        return Held(x, torch.cat([other[:, mat] for _, other in pieces]) if self.crossed else x)


def thinned(shown: Activations, n_rows: int) -> Activations:
    """Return `n_rows` rows or fewer, evenly spread, of what is shown."""
    return {names: x[:: -(-len(x) // max(1, n_rows))] for names, x in shown.items()}


def gather(
    holdout: HoldoutSplit,
    take: Callable[[int], Sequence[Activations]],
    workers: Workers,
    *,
    crossed: bool,
) -> Inputs:
    """Return the inputs that `take` shows for each chunk, for each model, the original first."""
    inputs = Inputs(crossed)
    n_held = -(-HELD_ROWS // len(holdout.held))
    for chunks in holdout.batches():
        summed = []
        for chunk, shown in zip(chunks, workers.each(take, chunks), strict=True):
            if holdout.is_summed(chunk):
                summed.append(shown)
            if chunk in holdout.held:
                inputs.hold([thinned(each, n_held) for each in shown])
        if summed:
            joined = [
                {names: torch.cat([shown[model][names] for shown in summed]) for names in summed[0][model]}
                for model in range(len(summed[0]))
            ]
            inputs.add(joined, workers)
    return inputs
