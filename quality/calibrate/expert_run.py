"""The routed experts of a layer: each is read, made, applied to its tokens, and forgotten.

Experts come from the busiest to the rarest, and the moments of their downs are pooled on the way. So a rare
expert leans on what the busier ones have shown, and one that no token reaches takes it all. Gate and up of an
expert that saw as many rows as they have columns are made under what this expert sees, those of a rarer one
under what the layer's experts see together.

The routes of the model that is being written decide which rows count. The original computes the same tokens
with the same expert for comparison; its own routes decide what becomes of its own hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from forward.experts import Experts
from forward.ffn import FeedForward
from forward.observe import Silent
from gguf_tools.errors import BadActivation
from quality.calibrate.capture import Capture
from quality.calibrate.inputs import HELD_ROWS, PIECE_ROWS, Inputs, Shown
from quality.calibrate.making import Part, Under
from quality.calibrate.models import Setting
from quality.calibrate.moments import Moments, Statistics

MIDDLE = ("middle",)
"""Key of what gate and up multiply, of the block and of all experts."""

LEAN = 0.1
"""Rows like the mean of the shared ones that an expert's statistics get, per column."""


@dataclass(frozen=True)
class Routes:
    """Where tokens go: experts, int64, and weights, float32, both (n_tokens, n_used) on the CPU."""

    experts: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def joined(cls, routes: Sequence[Routes]) -> Routes:
        return cls(torch.cat([each.experts for each in routes]), torch.cat([each.weights for each in routes]))

    def of(self, expert: int) -> Rows:
        """Return the tokens that go to an expert."""
        tokens, slots = torch.nonzero(self.experts == expert, as_tuple=True)
        return Rows(tokens, self.weights[tokens, slots])


@dataclass(frozen=True)
class Rows:
    """Numbers of tokens, ascending, and the weights of the expert's output for each."""

    tokens: torch.Tensor
    weights: torch.Tensor

    def among(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of these ascending tokens are here, bool, and the weights of those that are."""
        here = torch.isin(tokens, self.tokens)
        return here, self.weights[torch.searchsorted(self.tokens, tokens[here])]


@dataclass(frozen=True)
class _Computed:
    """What a piece of an expert's tokens gives.

    output     of the original, for its own tokens among them
    summed     what down multiplies, of rows that are summed up, by model
    held       the same of rows that are held back
    """

    tokens: torch.Tensor
    output: torch.Tensor
    summed: list[Shown]
    held: list[Shown]


class ExpertRun:
    """The experts of one layer at work.

    experts  of each model, the original first
    routes   of each model
    shared   has what gate and up of all experts multiply, unless all are made
    """

    def __init__(
        self,
        setting: Setting,
        number: int,
        experts: Sequence[Experts],
        routes: Sequence[Routes],
        shared: Inputs,
    ) -> None:
        self._setting, self._number, self._experts, self._routes = setting, number, experts, routes
        self._names = experts[0].names
        self._shared: Under | None = None
        self._pool: Moments | None = None
        missing = [name for name in (self._names.gate, self._names.up) if setting.is_missing(name)]
        if missing:
            self._shared = Under.of(shared.statistics(MIDDLE), None, missing[0])
        self._is_down_missing = setting.is_missing(self._names.down)

    def run(self) -> None:
        """Make all experts, and add their outputs to the hidden states."""
        n_experts = self._experts[0].n_experts
        counts = torch.bincount(self._routes[-1].experts.flatten(), minlength=n_experts).tolist()
        for expert in sorted(range(n_experts), key=lambda expert: (-counts[expert], expert)):
            self._run(expert, [routes.of(expert) for routes in self._routes])

    def _run(self, expert: int, rows: Sequence[Rows]) -> None:
        setting, own = self._setting, rows[-1]
        held = self._held_tokens(own.tokens)
        if self._shared is not None:
            self._make_gate_up(expert, own.tokens, held, self._shared)
        inputs = self._gather_down(expert, rows, held)
        if self._is_down_missing:
            self._make_down(expert, inputs)
        if setting.is_followed:
            self._finish(expert, own)

    def _held_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return some of an expert's tokens that are held back, evenly spread."""
        held = tokens[self._setting.division.held_tokens(tokens)]
        return held[:: -(-len(held) // HELD_ROWS)] if len(held) else held

    # ---- gate and up

    def _make_gate_up(self, expert: int, tokens: torch.Tensor, held: torch.Tensor, shared: Under) -> None:
        parts = [
            part for name in (self._names.gate, self._names.up) if (part := self._part(name, expert, shared))
        ]
        if not parts:
            return
        setting = self._setting
        inputs = Inputs(setting.is_followed)
        if len(held):
            inputs.hold(self._middles(held))
        summed = tokens[setting.division.summed_tokens(tokens)]
        n_cols = parts[0].info.n_cols
        under = replace(shared, statistics=replace(shared.statistics, n_seen=len(summed)))
        if len(summed) >= n_cols:
            for piece in summed.split(PIECE_ROWS):
                inputs.add(self._middles(piece), setting.workers)
            statistics = inputs.statistics(MIDDLE).leaning_on(shared.statistics, LEAN * n_cols)
            under = Under.of(statistics, None, parts[0].info.name)
        under = replace(under, held=inputs.held(MIDDLE))
        for part in parts:
            setting.maker.make([replace(part, under=under)])

    def _middles(self, tokens: torch.Tensor) -> list[Shown]:
        """Return what gate and up multiply, by model."""
        device = self._setting.device
        rows = (model.stream.middle.rows(tokens).to(device) for model in self._setting.models)
        return [{MIDDLE: x[:, None]} for x in rows]

    def _part(self, name: str, expert: int, under: Under) -> Part | None:
        """Return an expert's rows of a stack; None where they are not to be made, or are written."""
        info = self._setting.wanted.get(name)
        if info is None:
            return None
        n_rows = info.shape[-2]
        if not self._setting.maker.is_missing(name, expert * n_rows, n_rows):
            return None
        return Part(info, expert * n_rows, n_rows, under)

    # ---- down

    def _gather_down(self, expert: int, rows: Sequence[Rows], held: torch.Tensor) -> Inputs:
        """Add the original's output to its hidden states, and return what down multiplies."""
        setting = self._setting
        blocks = [experts.read(expert) for experts in self._experts]
        inputs = Inputs(setting.is_followed)
        tokens = torch.unique(torch.cat([each.tokens for each in rows]))
        after = setting.original.stream.after(self._number)

        def take(piece: torch.Tensor) -> _Computed:
            return self._compute(blocks, rows, piece, held)

        for computed in setting.workers.each(take, tokens.split(PIECE_ROWS) if len(tokens) else ()):
            here, weights = rows[0].among(computed.tokens)
            after.add(computed.tokens[here], computed.output, weights)
            if self._is_down_missing:
                inputs.add(computed.summed, setting.workers)
                inputs.hold(computed.held)
        return inputs

    def _compute(
        self, blocks: Sequence[FeedForward], rows: Sequence[Rows], tokens: torch.Tensor, held: torch.Tensor
    ) -> _Computed:
        setting, own = self._setting, torch.isin(tokens, rows[-1].tokens)
        mine = tokens[own]
        shown: list[torch.Tensor] = []
        output = torch.empty(0)
        for each, (model, block) in enumerate(zip(setting.models, blocks, strict=True)):
            capture = Capture((self._names.down,))
            wanted = tokens if each == 0 else mine
            result = block(model.stream.middle.rows(wanted).to(setting.device), capture)
            (inner,) = capture.inputs().values()
            shown.append(inner[own.to(setting.device)] if each == 0 else inner)
            if each == 0:
                here, _ = rows[0].among(tokens)
                output = result.cpu()[here]
                refuse_nonfinite(output, f"{self._names.down}, expert")
        summed = setting.division.summed_tokens(mine).to(setting.device)
        kept = torch.isin(mine, held).to(setting.device)
        key = (self._names.down,)
        return _Computed(tokens, output, [{key: x[summed]} for x in shown], [{key: x[kept]} for x in shown])

    def _make_down(self, expert: int, inputs: Inputs) -> None:
        setting, key = self._setting, (self._names.down,)
        info = setting.wanted[self._names.down]
        moments = inputs.moments.get(key)
        if moments is None:
            moments = Moments.zeros(1, info.n_cols, setting.device, cross=setting.is_followed)
        part = self._part(self._names.down, expert, Under(Statistics.of(moments), None, None, None))
        if part is not None:
            statistics = Statistics.of(moments)
            if self._pool is not None:
                statistics = statistics.leaning_on(Statistics.of(self._pool), LEAN * info.n_cols)
            setting.maker.make([replace(part, under=Under.of(statistics, inputs.held(key), info.name))])
        if self._pool is None:
            self._pool = moments
        else:
            self._pool.merge(moments)

    def _finish(self, expert: int, rows: Rows) -> None:
        """Add the output of the model that is being written to its hidden states."""
        setting, block = self._setting, self._experts[-1].read(expert)
        stream = setting.own.stream

        def take(piece: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            tokens, weights = piece
            output = block(stream.middle.rows(tokens).to(setting.device), Silent()).cpu()
            refuse_nonfinite(output, f"{self._names.down}, expert {expert}, as it is written")
            return tokens, output, weights

        for tokens, output, weights in setting.workers.each(take, _pieces(rows)):
            stream.after(self._number).add(tokens, output, weights)


def _pieces(rows: Rows) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if len(rows.tokens):
        yield from zip(rows.tokens.split(PIECE_ROWS), rows.weights.split(PIECE_ROWS), strict=True)


def refuse_nonfinite(states: torch.Tensor, name: str) -> None:
    """Raise BadActivation naming the tensor that the states come from."""
    if not bool(torch.isfinite(states.sum())):
        raise BadActivation(f"{name}: the hidden states after it have NaN or infinity")
