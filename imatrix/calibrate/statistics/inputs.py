"""Inputs of matrices over the whole text: how they are captured, their second moments, and a hold-out split.

Second moments are sums of x x^T over the rows x that a matrix multiplies, one for every matrix of a stack.
Pieces of rows are multiplied and added up in float32: what is lost is far below what the diagonal is damped
by. A sum is cut into units of its own rows, each of which is one task: pieces and units are the same for any
number of threads, and so are the sums.

Held-out chunks contribute to no sum. They are used to test whether calibration improved a tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from imatrix.forward.device import to_cpu, to_numpy
from imatrix.forward.observe import Silent
from imatrix.forward.workers import Workers
from quantize.formats.base import Floats32

_STRIP_COLS = 256
"""Number of columns of a unit: so few that sums of 768 columns have units for several threads."""

PAIR_BYTES = 24
"""Memory for each pair of columns of a matrix at most, as measured with 8192: in float32 its sums, those of
drift, the root of the inverse that makes up for drift, lifted moments and what rounding reads of them; and
strips on the way."""


def is_wide(n_outputs: int, n_cols: int) -> bool:
    """Whether a matrix has so few rows that sums through them take less to compute, see `Moments.through`."""
    return 2 * n_outputs < n_cols


@dataclass
class Moments:
    """The moments of a stack of matrices, on the device that computes.

    own      float32 (n_mats, n_cols, n_cols): sum of x x^T; the lower triangle is filled in by `whole`
    drift    the same shape: sum of (t - x) x^T, t what the original model's matrix multiplies where this one
             multiplies x; None where both are the same. With `through`, the sum of W (t - x) x^T, float32
             (1, n_outputs, n_cols)
    through  the one matrix W that multiplies t, (n_outputs, n_cols), where it has few rows: so the sum is
             smaller, and takes less to compute
    n_rows   rows that were added up, the same for all matrices
    """

    own: torch.Tensor
    drift: torch.Tensor | None
    through: torch.Tensor | None = None
    n_rows: int = 0

    @classmethod
    def zeros(
        cls,
        n_mats: int,
        n_cols: int,
        device: torch.device,
        *,
        drifts: bool,
        through: torch.Tensor | None = None,
    ) -> Moments:
        own = torch.zeros((n_mats, n_cols, n_cols), device=device)
        if not drifts:
            return cls(own, None)
        if through is None:
            return cls(own, torch.zeros_like(own))
        return cls(own, torch.zeros((1, *through.shape), device=device), through)

    def add(
        self,
        x: torch.Tensor,
        originals: torch.Tensor | None,
        workers: Workers,
        roots: torch.Tensor | None = None,
    ) -> None:
        """Add a piece of rows.

        x          float32 or bfloat16 (n_rows, n_mats, n_cols)
        originals  what the original model's matrices multiply, in the same shape; None where it is x
        roots      the root of each row's weight, float32 (n_rows,); None: all weigh 1
        """
        if not len(x):
            return
        moved = None if originals is None else _weighed(originals.float() - x.float(), roots)
        x = _weighed(x, roots)

        def take(unit: tuple[int, int]) -> None:
            mat, start = unit
            self.own[mat, start : start + _STRIP_COLS, start:] += (
                x[:, mat, start : start + _STRIP_COLS].T @ x[:, mat, start:]
            )

        def take_drift(unit: tuple[int, int]) -> None:
            assert moved is not None
            assert self.drift is not None
            mat, rows = unit[0], slice(unit[1], unit[1] + _STRIP_COLS)
            of_rows = (
                moved[:, mat, rows] if self.through is None else moved[:, mat] @ self.through[rows].float().T
            )
            self.drift[mat, rows] += of_rows.T @ x[:, mat]

        # The largest come first, and both kinds together, so that no thread waits for the last one of a kind.
        tasks = [] if self.drift is None else [partial(take_drift, unit) for unit in _units(self.drift)]
        tasks += [partial(take, unit) for unit in _units(self.own)]
        for _ in workers.each(operator.call, tasks):
            pass
        self.n_rows += len(x)

    def merge(self, other: Moments) -> None:
        """Add another sum."""
        self.own += other.own
        if self.drift is not None and other.drift is not None:
            self.drift += other.drift
        self.n_rows += other.n_rows

    def whole(self, mat: int) -> Floats32:
        """Return sum x x^T of one matrix, both triangles of it, (n_cols, n_cols); on the CPU no copy."""
        own = to_numpy(self.own[mat])
        n_cols = len(own)
        for start in range(0, n_cols, _STRIP_COLS):
            stop = min(start + _STRIP_COLS, n_cols)
            own[stop:, start:stop] = own[start:stop, stop:].T
        return own

    def drifted(self, mat: int) -> Floats32 | None:
        """Return sum (t - x) x^T of one matrix, (n_cols, n_cols)."""
        return None if self.drift is None else to_numpy(self.drift[mat])


def _units(sums: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the matrix and the first row of each unit of sums."""
    for mat in range(len(sums)):
        for start in range(0, sums.shape[1], _STRIP_COLS):
            yield mat, start


def _weighed(rows: torch.Tensor, roots: torch.Tensor | None) -> torch.Tensor:
    """Multiply rows, (n_rows, n_mats, n_cols), by the roots of their weights, float32."""
    return rows.float() if roots is None else rows.float() * roots.to(rows.device)[:, None, None]


@dataclass(frozen=True)
class Statistics:
    """Second moments of one matrix's inputs.

    own     float32 or float64 (n_cols, n_cols): sum of x x^T
    drift   sum of (t - x) x^T; None where t is x. Where `is_through`, the sum of W (t - x) x^T, float32
            (n_outputs, n_cols), with W the original's matrix
    n_rows  rows that they stand for; a fraction of one where rows of others were taken in with less weight
    n_seen  rows of the matrix itself that were added up
    """

    own: npt.NDArray[np.floating[Any]]
    drift: Floats32 | None
    n_rows: float
    n_seen: int
    is_through: bool = False

    @classmethod
    def of(cls, moments: Moments, mat: int = 0) -> Statistics:
        is_through, n_rows = moments.through is not None, moments.n_rows
        return cls(moments.whole(mat), moments.drifted(mat), n_rows, n_rows, is_through)

    def shrunk_towards(self, shared: Statistics, n_rows: float) -> Statistics:
        """Return these with `n_rows` rows that are like the mean of the shared ones."""
        if not shared.n_rows:
            return self
        share = np.float32(n_rows / shared.n_rows)
        drift = self.drift
        if drift is not None and shared.drift is not None:
            drift = drift + share * shared.drift
        return Statistics(self.own + share * shared.own, drift, self.n_rows + n_rows, self.n_seen)

    @property
    def is_finite(self) -> bool:
        # A column with NaN or infinity in one row has it in its own square.
        return bool(np.isfinite(np.diagonal(self.own)).all())

    def importances(self) -> npt.NDArray[np.float32]:
        """Return the mean square of each column, float32 (n_cols,), as an importance matrix has it."""
        return np.diagonal(self.own).astype(np.float32) / np.float32(self.n_rows)


class Seen(Exception):
    """All that was wanted has been shown; the rest of the chunk need not be computed."""


class Capture(Silent):
    """Keeps the inputs of the wanted matrices of one chunk.

    wanted  names of matrices
    stop    raise Seen as soon as the wanted ones have been shown; after stacks of heads, which are shown in
            pieces, when another matrix is
    """

    def __init__(self, wanted: Collection[str], *, stop: bool = False) -> None:
        self._wanted, self._stop = wanted, stop
        self._seen: set[str] = set()
        self._shown: dict[tuple[str, ...], torch.Tensor] = {}
        self._heads: dict[str, list[tuple[int, torch.Tensor]]] = {}

    def rows(self, names: Sequence[str], x: torch.Tensor) -> None:
        wanted = [name for name in names if name in self._wanted]
        if self._takes(wanted):
            self._shown[tuple(wanted)] = x[:, None].clone()
            if self._stop and not self._heads and self._seen.issuperset(self._wanted):
                raise Seen

    def heads(self, name: str, first: int, n_heads: int, x: torch.Tensor) -> None:
        if self._takes([name] if name in self._wanted else []):
            self._heads.setdefault(name, []).append((first, x.clone()))

    def row_groups(self, name: str, x: torch.Tensor) -> None:
        self.heads(name, 0, x.shape[1], x)

    def _takes(self, wanted: Sequence[str]) -> bool:
        if not wanted and self._stop and self._seen.issuperset(self._wanted):
            raise Seen
        self._seen.update(wanted)
        return bool(wanted)

    def inputs(self) -> dict[tuple[str, ...], torch.Tensor]:
        """Return the inputs of matrices, (n_tokens, n_mats, n_cols), by the names of those that share one."""
        return self._shown | {(name,): _joined(pieces) for name, pieces in self._heads.items()}


def _joined(pieces: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Return rows that came in pieces: runs of heads, and for the same heads runs of tokens."""
    runs: dict[int, list[torch.Tensor]] = {}
    for first, x in pieces:
        runs.setdefault(first, []).append(x)
    return torch.cat([torch.cat(runs[first]) for first in sorted(runs)], 1)


class Order(Silent):
    """Keeps the names of the matrices, grouped by input, in the order in which they are shown."""

    def __init__(self) -> None:
        self.groups: list[tuple[str, ...]] = []

    def rows(self, names: Sequence[str], x: torch.Tensor) -> None:
        self._add(tuple(names))

    def heads(self, name: str, first: int, n_heads: int, x: torch.Tensor) -> None:
        self._add((name,))

    def row_groups(self, name: str, x: torch.Tensor) -> None:
        self._add((name,))

    def _add(self, names: tuple[str, ...]) -> None:
        if names not in self.groups:
            self.groups.append(names)


PIECE_ROWS = 2048
"""Rows of a piece, about: with fewer, matrix products are slower, and these of 65536 columns take 0.5 GB."""

HELD_ROWS = 512
"""Most held-out rows of a matrix. With more, comparing encodings takes longer than encoding."""

_MOST_HELD = 8
"""Chunks that are held out, at most, where classes are fewer."""

Activations = Mapping[tuple[str, ...], torch.Tensor]
"""Inputs of matrices, (n_rows, n_mats, n_cols), by the names of all that have the same input."""


WeightsOf = Callable[[tuple[str, ...]], torch.Tensor | None]
"""Returns the weight of each token of the text in the moments of what matrices multiply, float32 (n_tokens,),
by the names of those that have the same input. None: all weigh 1."""


def unweighed(names: tuple[str, ...]) -> None:
    """Weigh all tokens alike: a WeightsOf."""


@dataclass(frozen=True)
class HeldPlaces:
    """Where held-out rows are in the text.

    tokens      their numbers, int64 (n_rows,)
    shares      of its chunk's tokens that each row stands for, float32 (n_rows,)
    chunk_size  in tokens
    """

    tokens: torch.Tensor
    shares: torch.Tensor
    chunk_size: int

    @property
    def chunks(self) -> torch.Tensor:
        """Return the chunk of each row, int64 (n_rows,)."""
        return self.tokens // self.chunk_size

    def weighed(self, weights: torch.Tensor | None) -> HeldPlaces:
        """Let rows count as much as their tokens weigh; `weights` are those of the whole text.

        A chunk's first token has rows a thousand times as large as others in some matrices that no prediction
        depends on. So without weights it does not count.
        """
        by_row = (self.tokens % self.chunk_size > 0).float() if weights is None else weights[self.tokens]
        return replace(self, shares=self.shares * by_row)

    @classmethod
    def joined(cls, places: Sequence[HeldPlaces]) -> HeldPlaces:
        tokens = torch.cat([each.tokens for each in places])
        shares = torch.cat([each.shares for each in places])
        return cls(tokens, shares, places[0].chunk_size)


@dataclass(frozen=True)
class Held:
    """Held-out rows of one matrix.

    x          float32 (n_rows, n_cols), on the CPU
    originals  the inputs of the original's matrix; the same object where they are x
    """

    x: torch.Tensor
    originals: torch.Tensor
    places: HeldPlaces


@dataclass(frozen=True)
class HoldoutSplit:
    """Which chunks of a text are summed up, and which are held out.

    held     numbers of the held-out chunks; a single chunk is in both parts
    classes  the kind of text of each chunk; empty for a single text
    """

    n_chunks: int
    chunk_size: int
    held: tuple[int, ...]
    classes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        n_chunks: int,
        chunk_size: int,
        classes: tuple[str, ...] = (),
        known: Collection[int] = (),
    ) -> HoldoutSplit:
        """Hold out one chunk of eight of each class, evenly spread, but none of the known ones.

        There are 8 at most or, of more classes, one of each. A class of one chunk keeps it, unless all do.
        Where all chunks are known, that makes no difference.
        """
        by_class: dict[str, list[int]] = {}
        for chunk, name in enumerate(classes or ("",) * n_chunks):
            by_class.setdefault(name, []).append(chunk)
        everything = list(range(n_chunks))
        groups = [group for group in by_class.values() if len(group) > 1] or [everything]
        new = [[chunk for chunk in group if chunk not in known] for group in groups]
        groups = [group for group in new if group] or groups
        most = max(1, _MOST_HELD // len(groups))
        held = sorted(chunk for group in groups for chunk in _spread(group, most))
        return cls(n_chunks, chunk_size, tuple(held), classes)

    def is_summed(self, chunk: int) -> bool:
        return chunk not in self.held or self.n_chunks == 1

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

    def places(self, tokens: torch.Tensor, step: int) -> HeldPlaces:
        """Tell where held-out rows are; `step` is how many tokens each of them stands for.

        A chunk's first token stands for itself alone.
        """
        shares = torch.where(tokens % self.chunk_size > 0, step, 1).float() / self.chunk_size
        return HeldPlaces(tokens, shares, self.chunk_size)


def _spread(chunks: Sequence[int], most: int) -> Iterator[int]:
    """Yield one chunk of eight, evenly spread, one at least and `most` at most."""
    n_held = min(most, max(1, len(chunks) // 8))
    step = len(chunks) / n_held
    for number in range(n_held):
        yield chunks[int((number + 0.5) * step)]


@dataclass
class Inputs:
    """The inputs of some matrices.

    drifts   whether the original's inputs differ
    weights  of the tokens, see `WeightsOf`
    through  see `Moments`
    moments  by the names of all matrices that have the same input
    """

    drifts: bool
    weights: WeightsOf = unweighed
    through: torch.Tensor | None = None
    moments: dict[tuple[str, ...], Moments] = field(default_factory=dict)
    _held: dict[tuple[str, ...], list[Held]] = field(default_factory=dict)

    def add(self, shown: Sequence[Activations], tokens: torch.Tensor, workers: Workers) -> None:
        """Add rows to the sums.

        shown   by each model, the original first
        tokens  numbers of the rows' tokens, int64 (n_rows,)
        """
        originals, own = shown[0], shown[-1]
        for names, x in own.items():
            weights = self.weights(names)
            roots = None if weights is None else weights[tokens].sqrt()
            moments = self.moments.get(names)
            if moments is None:
                n_mats, n_cols = x.shape[1:]
                moments = Moments.zeros(n_mats, n_cols, x.device, drifts=self.drifts, through=self.through)
                self.moments[names] = moments
            moments.add(x, originals[names] if self.drifts else None, workers, roots)

    def hold(self, shown: Sequence[Activations], places: HeldPlaces) -> None:
        """Keep held-out rows, of all matrices of a stack."""
        for names, x in shown[-1].items():
            mine = to_cpu(x.float())
            other = to_cpu(shown[0][names].float()) if self.drifts else mine
            weighed = places.weighed(self.weights(names))
            self._held.setdefault(names, []).append(Held(mine, other, weighed))

    def statistics(self, names: tuple[str, ...], mat: int = 0) -> Statistics:
        return Statistics.of(self.moments[names], mat)

    def held(self, names: tuple[str, ...], mat: int = 0) -> Held | None:
        """Return the held-out rows of a matrix; None if there are none."""
        pieces = self._held.get(names, [])
        if not sum(len(each.x) for each in pieces):
            return None
        x = torch.cat([each.x[:, mat] for each in pieces])
        originals = torch.cat([each.originals[:, mat] for each in pieces]) if self.drifts else x
        return Held(x, originals, HeldPlaces.joined([each.places for each in pieces]))


def gather(
    holdout: HoldoutSplit,
    take: Callable[[int], Sequence[Activations]],
    workers: Workers,
    *,
    drifts: bool,
    weights: WeightsOf = unweighed,
    through: torch.Tensor | None = None,
) -> Inputs:
    """Gather the inputs that `take` shows for each chunk, for each model, the original first.

    drifts, weights, through  see `Inputs`
    """
    inputs = Inputs(drifts, weights, through)
    n_held = -(-HELD_ROWS // len(holdout.held))
    step = -(-holdout.chunk_size // n_held)
    for chunks in holdout.batches():
        summed, tokens = [], []
        for chunk, shown in zip(chunks, workers.each(take, chunks), strict=True):
            rows = torch.arange(chunk * holdout.chunk_size, (chunk + 1) * holdout.chunk_size)
            if holdout.is_summed(chunk):
                summed.append(shown)
                tokens.append(rows)
            if chunk in holdout.held:
                thinned = [{names: x[::step] for names, x in each.items()} for each in shown]
                inputs.hold(thinned, holdout.places(rows[::step], step))
        if summed:
            joined = [
                {names: torch.cat([shown[model][names] for shown in summed]) for names in summed[0][model]}
                for model in range(len(summed[0]))
            ]
            inputs.add(joined, torch.cat(tokens), workers)
    return inputs
