"""The routed experts of a layer: a few at a time are read, encoded, applied to their tokens, and forgotten.

Experts come from the original's busiest to its rarest, so that the original's hidden states are the same sums
beside any type. The moments of their downs are pooled on the way. The moments of a rare expert are shrunk
towards that pool, and an expert that no token reaches takes the pool itself. Gate and up of an expert that
saw as many rows as they have columns are encoded under its own inputs, those of a rarer one under the inputs
of all the layer's experts.

The routes of the model that is being written decide which rows count. The original computes the same tokens
with the same expert for comparison; its own routes decide what becomes of its own hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from imatrix.calibrate.run.context import RunContext
from imatrix.calibrate.run.encode import RowGroup
from imatrix.calibrate.statistics.conditions import Conditions
from imatrix.calibrate.statistics.inputs import (
    HELD_ROWS,
    PAIR_BYTES,
    PIECE_ROWS,
    Activations,
    HeldPlaces,
    Inputs,
    Moments,
    Statistics,
)
from imatrix.forward.device import to_cpu
from imatrix.forward.layer import refuse_nonfinite
from imatrix.forward.layers.experts import Experts
from imatrix.forward.layers.ffn import FeedForward
from imatrix.forward.observe import Silent
from imatrix.forward.sweep import Routes

MIDDLE = ("middle",)
"""Key of the input of gate and up, of the block and of all experts."""

SHRINKAGE_ROWS = 0.1
"""Rows like the mean of the shared ones that an expert's statistics get, per column."""

_THREAD_BYTES = 256 << 20
"""Memory that the statistics of experts may take for each thread, beyond those of one expert."""


@dataclass(frozen=True)
class ExpertRows:
    """Numbers of tokens, ascending, and the weights of the expert's output for each."""

    tokens: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, routes: Routes, expert: int) -> Self:
        """Return the tokens that go to an expert."""
        tokens, slots = torch.nonzero(routes.experts == expert, as_tuple=True)
        return cls(tokens, routes.weights[tokens, slots])

    def among(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of these ascending tokens are here, bool, and the weights of those that are."""
        here = torch.isin(tokens, self.tokens)
        return here, self.weights[torch.searchsorted(self.tokens, tokens[here])]


@dataclass(frozen=True)
class _Computed:
    """An expert's results for a piece of its tokens.

    output     of the original, for its own tokens among them; None where another run has added it
    summed     what down multiplies, of rows that are summed up, by model
    held       the same of held-out rows
    held_places  where these are in the text
    summed_tokens  numbers of the rows that are summed up
    """

    tokens: torch.Tensor
    output: torch.Tensor | None
    summed_tokens: torch.Tensor
    summed: list[Activations]
    held: list[Activations]
    held_places: HeldPlaces


@dataclass(frozen=True)
class _Visit:
    """An expert whose turn has come.

    rows  that go to it, of each model, the original first
    held  numbers of held-out tokens, evenly spread
    step  how many of its held-out tokens each of them stands for
    """

    expert: int
    rows: Sequence[ExpertRows]
    held: torch.Tensor
    step: int

    @property
    def own(self) -> ExpertRows:
        """The rows that count."""
        return self.rows[-1]


def statistics_cols(n_rows: int, n_cols: int, width: int) -> int:
    """Return how many columns the statistics of an expert have that sees so many rows, or fewer.

    Gate and up of one that sees few have none of their own.
    """
    return width if n_rows < n_cols else max(width, n_cols)


def experts_at_once(n_cols: int, n_threads: int, n_batches: int = 0) -> int:
    """Return how many experts, with statistics of `n_cols` columns, are made at a time.

    An expert alone has too few matrices for many threads. The number changes no byte.

    n_batches  of strips that are encoded at the same time, where that is not done by the threads
    """
    return max(1, min(max(n_threads, n_batches), n_threads * _THREAD_BYTES // (PAIR_BYTES * n_cols**2)))


class ExpertRun:
    """The experts of one layer at work: each multiplies what stands at one end, and adds to the other.

    experts  of each model, the original first
    routes   of each model
    shared   has the inputs of gate and up of all experts, unless all are written
    """

    def __init__(
        self,
        context: RunContext,
        number: int,
        experts: Sequence[Experts],
        routes: Sequence[Routes],
        shared: Inputs,
    ) -> None:
        self._context, self._experts, self._routes = context, experts, routes
        self._names = experts[0].names
        streams = [model.stream for model in context.models]
        if experts[0].latent is None:
            self._ends = [(stream.middle, stream.after(number)) for stream in streams]
        else:
            self._ends = [stream.latent for stream in streams]
        self._weights = shared.weights
        self._shared: tuple[Statistics, Conditions] | None = None
        self._pool: Moments | None = None
        missing = [name for name in self._names.inputs if context.is_missing(name)]
        if missing:
            statistics = shared.statistics(MIDDLE)
            (conditions,) = context.conditions_of([(statistics, None)], missing[0])
            self._shared = statistics, conditions
        self._is_down_missing = context.is_missing(self._names.down)

    def run(self) -> None:
        """Encode all experts, and add their outputs to the hidden states."""
        experts = self._experts[0]
        counts, own_counts = (
            torch.bincount(routes.experts.flatten(), minlength=experts.n_experts).tolist()
            for routes in (self._routes[0], self._routes[-1])
        )
        order = sorted(range(experts.n_experts), key=lambda expert: (-counts[expert], expert))
        n_threads, n_batches = self._context.workers.n_threads, self._context.encoder.n_at_once
        while order:
            most = max(own_counts[expert] for expert in order)
            n_cols = statistics_cols(most, experts.n_cols, experts.width)
            n_together = experts_at_once(n_cols, n_threads, n_batches)
            self._run([self._visit(expert) for expert in order[:n_together]])
            del order[:n_together]

    def _visit(self, expert: int) -> _Visit:
        rows = [ExpertRows.of(routes, expert) for routes in self._routes]
        held = rows[-1].tokens[self._context.holdout.held_tokens(rows[-1].tokens)]
        step = max(1, -(-len(held) // HELD_ROWS))
        return _Visit(expert, rows, held[::step], step)

    def _run(self, visits: Sequence[_Visit]) -> None:
        """Encode some experts, each under conditions that depend on none but the ones before it."""
        if self._shared is not None:
            self._make_gates_and_ups(visits, *self._shared)
        inputs = [self._gather_down(visit) for visit in visits]
        if self._is_down_missing:
            self._make_downs(visits, inputs)
        if self._context.is_followed:
            for visit in visits:
                self._finish(visit)

    # ---- gate and up

    def _make_gates_and_ups(
        self, visits: Sequence[_Visit], statistics: Statistics, shared: Conditions
    ) -> None:
        context, n_cols = self._context, self._experts[0].n_cols
        missing: list[tuple[list[RowGroup], Inputs, int]] = []
        for visit in visits:
            every = (self._group(name, visit.expert, shared) for name in self._names.inputs)
            groups = [group for group in every if group is not None]
            if groups:
                missing.append((groups, *self._gather_gate_up(visit)))
        own = [
            (
                inputs.statistics(MIDDLE).shrunk_towards(statistics, SHRINKAGE_ROWS * n_cols),
                inputs.held(MIDDLE),
            )
            for _, inputs, _ in missing
            if inputs.moments
        ]
        of_own = context.conditions_of(own, self._names.gate)
        made = []
        for groups, inputs, n_seen in missing:
            if inputs.moments:
                conditions = next(of_own)
            else:
                conditions = replace(shared, n_seen=n_seen, held=inputs.held(MIDDLE))
            made += [replace(group, conditions=conditions) for group in groups]
        context.encoder.make(made)

    def _gather_gate_up(self, visit: _Visit) -> tuple[Inputs, int]:
        """Return the inputs of gate and up of an expert, summed up if there are enough; and how many rows."""
        context = self._context
        inputs = Inputs(context.corrects_drift, self._weights)
        if len(visit.held):
            inputs.hold(self._middles(visit.held), context.holdout.places(visit.held, visit.step))
        summed = visit.own.tokens[context.holdout.summed_tokens(visit.own.tokens)]
        if len(summed) >= self._experts[0].n_cols:
            for piece in summed.split(PIECE_ROWS):
                inputs.add(self._middles(piece), piece, context.workers)
        return inputs, len(summed)

    def _middles(self, tokens: torch.Tensor) -> list[Activations]:
        """Return the inputs of gate and up, by model."""
        device = self._context.device
        rows = (inputs.rows(tokens).to(device) for inputs, _ in self._ends)
        return [{MIDDLE: x[:, None]} for x in rows]

    def _group(self, name: str, expert: int, conditions: Conditions) -> RowGroup | None:
        """Return an expert's rows of a stack; None where they are not to be made, or are written."""
        info = self._context.wanted.get(name)
        if info is None:
            return None
        n_rows = info.shape[-2]
        if not self._context.is_missing(name, expert * n_rows, n_rows):
            return None
        return RowGroup(info, expert * n_rows, n_rows, conditions)

    # ---- down

    def _gather_down(self, visit: _Visit) -> Inputs:
        """Add the original's output to its hidden states, and return the inputs of down."""
        context, rows = self._context, visit.rows
        blocks = [experts.read(visit.expert) for experts in self._experts]
        inputs = Inputs(context.corrects_drift, self._weights)
        tokens = torch.unique(torch.cat([each.tokens for each in rows]))
        _, sums = self._ends[0]

        def take(piece: torch.Tensor) -> _Computed:
            return self._compute(blocks, visit, piece)

        for computed in context.workers.each(take, tokens.split(PIECE_ROWS) if len(tokens) else ()):
            if computed.output is not None:
                here, weights = rows[0].among(computed.tokens)
                sums.add(computed.tokens[here], computed.output, weights)
            if self._is_down_missing:
                inputs.add(computed.summed, computed.summed_tokens, context.workers)
                inputs.hold(computed.held, computed.held_places)
        return inputs

    def _compute(self, blocks: Sequence[FeedForward], visit: _Visit, tokens: torch.Tensor) -> _Computed:
        context, device = self._context, self._context.device
        mine = torch.isin(tokens, visit.own.tokens)
        x = self._ends[0][0].rows(tokens).to(device)
        inner = blocks[0].gate_up(x, Silent())
        output = None
        if not context.passed.has_experts:
            here, _ = visit.rows[0].among(tokens)
            output = to_cpu(blocks[0].project_down(inner[here.to(device)], Silent()).float())
            refuse_nonfinite(output, f"{self._names.down}, expert {visit.expert}")
        shown = [inner[mine.to(device)]]
        tokens_here = tokens[mine]
        if context.is_followed:
            x = self._ends[-1][0].rows(tokens_here).to(device)
            shown.append(blocks[-1].gate_up(x, Silent()))
        is_summed = context.holdout.summed_tokens(tokens_here)
        summed = is_summed.to(device)
        is_held = torch.isin(tokens_here, visit.held)
        held = is_held.to(device)
        key = (self._names.down,)
        return _Computed(
            tokens,
            output,
            tokens_here[is_summed],
            [{key: each[summed][:, None]} for each in shown],
            [{key: each[held][:, None]} for each in shown],
            context.holdout.places(tokens_here[is_held], visit.step),
        )

    def _make_downs(self, visits: Sequence[_Visit], gathered: Sequence[Inputs]) -> None:
        context, key = self._context, (self._names.down,)
        info = context.wanted[self._names.down]
        groups, shown = [], []
        for visit, inputs in zip(visits, gathered, strict=True):
            moments = inputs.moments.get(key)
            if moments is None:
                moments = Moments.zeros(1, info.n_cols, context.device, drifts=context.corrects_drift)
            group = self._group(self._names.down, visit.expert, Conditions.nothing())
            if group is not None:
                statistics = Statistics.of(moments)
                if self._pool is not None:
                    n_cols = context.real_cols.get(info.name, info.n_cols)
                    statistics = statistics.shrunk_towards(Statistics.of(self._pool), SHRINKAGE_ROWS * n_cols)
                groups.append(group)
                shown.append((statistics, inputs.held(key)))
            if self._pool is None:  # its own memory: the statistics above share that of `moments`
                self._pool = Moments.zeros(1, info.n_cols, context.device, drifts=context.corrects_drift)
            self._pool.merge(moments)
        made = context.conditions_of(shown, info.name)
        context.encoder.make(
            [replace(group, conditions=conditions) for group, conditions in zip(groups, made, strict=True)]
        )

    def _finish(self, visit: _Visit) -> None:
        """Add the output of the model that is being written to its hidden states."""
        context, block = self._context, self._experts[-1].read(visit.expert)
        inputs, sums = self._ends[-1]

        def take(piece: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            tokens, weights = piece
            output = to_cpu(block(inputs.rows(tokens).to(context.device), Silent()))
            refuse_nonfinite(output, f"{self._names.down}, expert {visit.expert}, as it is written")
            return tokens, output, weights

        for tokens, output, weights in context.workers.each(take, _pieces(visit.own)):
            sums.add(tokens, output, weights)


def _pieces(rows: ExpertRows) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if len(rows.tokens):
        yield from zip(rows.tokens.split(PIECE_ROWS), rows.weights.split(PIECE_ROWS), strict=True)
