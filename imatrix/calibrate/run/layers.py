"""One layer: the inputs of its matrices are gathered, they are encoded, and the hidden states go on.

One pass over the chunks shows what all matrices of the original's attention multiply. Where the model that is
being written follows, matrices are encoded in stages: each sees what the ones before it, as they stand in the
output, have made of the text. A stage is a pass of that model, which ends once the inputs of its matrices are
known. The block after the attention is encoded in the same way from the rows in `middle`, and
experts one by one (see experts.py). What takes rows to the columns of latent experts is encoded before these,
what takes their sums back after them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from imatrix.calibrate.run.context import Model, RunContext
from imatrix.calibrate.run.experts import MIDDLE, ExpertRun
from imatrix.calibrate.run.original import Way
from imatrix.calibrate.statistics.inputs import (
    Activations,
    Capture,
    Inputs,
    Order,
    Seen,
    WeightsOf,
    gather,
    is_wide,
)
from imatrix.forward.device import to_cpu
from imatrix.forward.hidden_states import States, clear
from imatrix.forward.layer import Layer, refuse_nonfinite
from imatrix.forward.layers.experts import Experts
from imatrix.forward.layers.ffn import BlockNames, FeedForward
from imatrix.forward.layers.latent_experts import LatentColumns
from imatrix.forward.layers.residual import joined
from imatrix.forward.observe import Observer, Silent
from imatrix.forward.sweep import Routes
from imatrix.forward.workers import give_back

_OWN = "own"
"""Marks what is kept of the model that is being written."""


@dataclass(frozen=True)
class LayerRun:
    """One layer at work.

    original  the layer of the original without its block; that of the model that is being written is read
              whenever it is needed
    block     names of the block's matrices, which are in memory while something goes through them
    weights   of the tokens, see `Inputs`
    """

    context: RunContext
    number: int
    original: Layer
    block: BlockNames | None
    weights: WeightsOf

    @classmethod
    def of(cls, context: RunContext, number: int) -> LayerRun:
        whole = context.original.layer(number)
        names = None if whole.block is None else whole.block.names
        return cls(context, number, replace(whole, block=None), names, context.weights.of_layer(number))

    def run(self) -> None:
        """Encode the layer's tensors, and leave the hidden states after it in the streams.

        raises  BadActivation naming layer and tensor for NaN or infinity, and what writing raises
        """
        stream, before = self.context.original.stream, self.number - 1
        self.context.passed.enter(self.number, lambda: stream.restore(before))
        ways = self._attend()
        give_back()
        shared = self._gather_middle()
        self._block(shared, ways)
        give_back()
        experts = self.original.experts
        if experts is not None:
            latent = experts.latent
            if latent is not None:
                shared = self._enter_latent(latent.down.name, experts.names, shared)
            routes = [way.routes for way in ways if way.routes is not None]
            ExpertRun(self.context, self.number, self._experts(), routes, shared).run()
            if latent is not None:
                self._leave_latent(latent.up.name, ways)
            self.context.passed.has_experts = True
            give_back()

    def _chunk_rows(self, chunk: int) -> tuple[int, int]:
        size = self.context.holdout.chunk_size
        return chunk * size, (chunk + 1) * size

    def _gather(
        self, take: Callable[[int], Sequence[Activations]], through: torch.Tensor | None = None
    ) -> Inputs:
        context = self.context
        drifts = context.corrects_drift
        return gather(
            context.holdout, take, context.workers, drifts=drifts, weights=self.weights, through=through
        )

    # ---- attention

    def _attend(self) -> list[Way]:
        """Encode the matrices up to the block, fill `middle` and `after`; return each model's way past it."""
        context, order = self.context, self._order()
        if not context.is_followed:
            inputs, way = self._pass(self._missing(order))
            self._make(inputs)
            return [way]
        if context.passed.way is None:
            context.passed.way = self._pass_original(order)
        for names in order:
            wanted = self._missing([names])
            if wanted:
                self._make(self._stage(names, wanted))
        return [context.passed.way, self._pass_one(context.own, self._own(), ())]

    def _make(self, inputs: Inputs) -> None:
        for names in inputs.moments:
            self.context.make(inputs, names, names)

    def _order(self) -> list[tuple[str, ...]]:
        """Return the matrices up to the block, those with the same input together, in their order."""
        context, order = self.context, Order()
        with torch.inference_mode():
            hidden = self._entered(context.original, self.original, 0, order)
            self.original.attention_block(hidden, order)
        return order.groups

    def _entered(self, model: Model, layer: Layer, chunk: int, observer: Observer) -> torch.Tensor:
        """Return the rows of a chunk that a layer begins with."""
        start, stop = self._chunk_rows(chunk)
        hidden = model.stream.before(self.number).read(start, stop).to(self.context.device)
        return layer.enter(hidden, self.context.tokens[start:stop], observer)

    def _own(self) -> Layer:
        """Return the layer of the model that is being written, as it is now, without its block."""
        return replace(self.context.own.layer(self.number), block=None)

    def _missing(self, groups: Iterable[Iterable[str]]) -> list[str]:
        return [name for names in groups for name in names if self.context.is_missing(name)]

    def _stage(self, names: tuple[str, ...], wanted: Sequence[str]) -> Inputs:
        """Return the inputs of the wanted ones of matrices that share one, without computing what follows."""
        context, own = self.context, self._own()

        def shown(model: Model, layer: Layer, chunk: int) -> torch.Tensor:
            capture = Capture(wanted, stop=True)
            with suppress(Seen):
                layer.attention_block(self._entered(model, layer, chunk, capture), capture)
            return capture.inputs()[tuple(wanted)]

        def take(chunk: int) -> list[Activations]:
            x = context.kept.get(names, chunk)
            if x is None:
                x = shown(context.original, self.original, chunk)
            return [{tuple(wanted): each} for each in (x, shown(context.own, own, chunk))]

        return self._gather(take)

    def _pass(self, wanted: Collection[str]) -> tuple[Inputs, Way]:
        """Compute the original's attention up to `middle`.

        returns  the inputs of the wanted matrices, and the way past the block
        """
        context, ways = self.context, dict[int, Way]()

        def take(chunk: int) -> list[Activations]:
            capture = Capture(wanted)
            ways[chunk] = self._attend_chunk(context.original, self.original, chunk, capture)
            return [capture.inputs()]

        inputs = self._gather(take)
        return inputs, Way.joined([ways[chunk] for chunk in sorted(ways)])

    def _pass_original(self, order: Sequence[tuple[str, ...]]) -> Way:
        """Compute the original's attention up to `middle`; keep what matrices multiply.

        The first ones multiply what takes next to nothing to compute.
        """
        wanted = [name for names in order[1:] for name in names]
        return self._pass_one(self.context.original, self.original, wanted)

    def _pass_one(self, model: Model, layer: Layer, wanted: Collection[str]) -> Way:
        """Compute the attention of a model up to `middle`, and keep what the wanted matrices multiply."""
        context = self.context

        def take(chunk: int) -> Way:
            capture = Capture(wanted)
            way = self._attend_chunk(model, layer, chunk, capture)
            for names, x in capture.inputs().items():
                context.kept.keep(names, chunk, x)
            return way

        return Way.joined(list(context.workers.each(take, range(context.holdout.n_chunks))))

    def _attend_chunk(self, model: Model, layer: Layer, chunk: int, observer: Observer) -> Way:
        """Put one chunk's hidden states after the attention in `after`, normalised ones in `middle`."""
        start, stop = self._chunk_rows(chunk)
        passage = layer.attention_block(self._entered(model, layer, chunk, observer), observer)
        x = layer.norm(passage.x)
        model.stream.middle.write(start, to_cpu(x.to(self.context.dtype)))
        model.stream.after(self.number).write(start, to_cpu(passage.rest))
        routes = None
        if layer.experts is not None:
            chosen = layer.chosen_by(self.context.tokens[start:stop])
            chosen, weights = layer.route(passage, x, Silent(), chosen)
            routes = Routes(to_cpu(chosen), to_cpu(weights))
        return Way(routes, None if passage.shares is None else to_cpu(passage.shares))

    # ---- what every token goes through

    def _gather_middle(self) -> Inputs:
        """Return the inputs of gate and up, of the block and of all experts together; nothing where all of
        them are written."""
        context = self.context
        experts = self.original.experts
        names = [] if self.block is None else [self.block.inputs]
        if experts is not None:
            names.append(experts.names.inputs if experts.latent is None else (experts.latent.down.name,))
        return self._gather_rows([model.stream.middle for model in context.models], names)

    def _gather_rows(self, stored: Sequence[States], names: Iterable[Iterable[str]]) -> Inputs:
        """Return the rows of each model as the inputs of some matrices; nothing where all are written."""
        context = self.context

        def take(chunk: int) -> list[Activations]:
            rows = self._chunk_rows(chunk)
            return [{MIDDLE: states.read(*rows).to(context.device)[:, None]} for states in stored]

        if not self._missing(names):
            return Inputs(context.corrects_drift, self.weights)
        return self._gather(take)

    def _block(self, shared: Inputs, ways: Sequence[Way]) -> None:
        """Encode the dense block or shared expert, and add its output to the hidden states."""
        context, names = self.context, self.block
        if names is None:
            return
        context.make(shared, MIDDLE, names.inputs)
        blocks = [self._read_block(model) for model in context.models]
        n_outputs, n_cols = blocks[0].down.shape
        through = blocks[0].down if is_wide(n_outputs, n_cols) else None
        key, own_key = (names.down,), (_OWN, names.down)

        def take(chunk: int) -> list[Activations]:
            shown = [self._inner_of_original(blocks[0], ways[0], chunk)]
            for own in blocks[1:]:
                shown.append(own.gate_up(self._middle(context.own, chunk), Silent()))
                context.kept.keep(own_key, chunk, shown[-1])
            return [{key: inner[:, None]} for inner in shown]

        inputs = self._gather(take, through)
        context.passed.has_block = True
        blocks.clear()
        context.make(inputs, key, key)
        del inputs
        if context.is_followed:
            own = self._read_block(context.own)

            def finish(chunk: int) -> None:
                x, inner = self._middle(context.own, chunk), context.kept.take(own_key, chunk)
                inner = own.gate_up(x, Silent()) if inner is None else inner
                self._add(context.own, ways[-1], chunk, own.finish(inner, x, Silent()), names.down)

            for _ in context.workers.each(finish, range(context.holdout.n_chunks)):
                pass

    def _read_block(self, model: Model) -> FeedForward:
        block = model.layer(self.number).block
        assert block is not None
        return block

    def _inner_of_original(self, block: FeedForward, way: Way, chunk: int) -> torch.Tensor:
        """Return the input of the original's down, and add its output to the hidden states if no run has."""
        passed, down = self.context.passed, block.names.down
        inner = passed.kept.get((down,), chunk)
        if inner is None:
            x = self._middle(self.context.original, chunk)
            inner = block.gate_up(x, Silent())
            if not passed.has_block:
                self._add(self.context.original, way, chunk, block.finish(inner, x, Silent()), down)
                if passed.is_shared:
                    passed.kept.keep((down,), chunk, inner)
        return inner

    # ---- latent experts

    def _experts(self) -> list[Experts]:
        """Return the experts of each model."""
        layers = (model.layer(self.number) for model in self.context.models)
        return [layer.experts for layer in layers if layer.experts is not None]

    def _latents(self) -> list[LatentColumns]:
        return [experts.latent for experts in self._experts() if experts.latent is not None]

    def _enter_latent(self, down: str, names: BlockNames, shared: Inputs) -> Inputs:
        """Encode the matrix before latent experts, under `shared`, and return the inputs of `names`."""
        context = self.context
        context.make(shared, MIDDLE, (down,))
        for model, latent in zip(context.models, self._latents(), strict=True):
            if self._is_at_work(model):
                self._fill_latent(model, latent)
        return self._gather_rows([model.stream.latent[0] for model in context.models], [names.inputs])

    def _fill_latent(self, model: Model, latent: LatentColumns) -> None:
        """Compute what a model's latent experts multiply, and make room for their sums."""
        inputs, sums = model.stream.latent

        def enter(chunk: int) -> None:
            x = latent.enter(self._middle(model, chunk), Silent())
            inputs.write(self._chunk_rows(chunk)[0], to_cpu(x))

        clear(sums)
        for _ in self.context.workers.each(enter, range(self.context.holdout.n_chunks)):
            pass

    def _leave_latent(self, up: str, ways: Sequence[Way]) -> None:
        """Encode the matrix `up` behind latent experts, and add what it makes of their sums."""
        context, latents, key = self.context, self._latents(), (up,)

        def take(chunk: int) -> list[Activations]:
            pairs = zip(context.models, latents, strict=True)
            return [{key: latent.before_up(self._summed(model, chunk))[:, None]} for model, latent in pairs]

        if self._missing([key]):
            context.make(self._gather(take), key, key)
        for model, latent, way in zip(context.models, self._latents(), ways, strict=True):
            if self._is_at_work(model):
                self._add_latent(model, latent, way)

    def _add_latent(self, model: Model, latent: LatentColumns, way: Way) -> None:
        def leave(chunk: int) -> None:
            output = latent.leave(self._summed(model, chunk), Silent())
            self._add(model, way, chunk, output, latent.up.name)

        for _ in self.context.workers.each(leave, range(self.context.holdout.n_chunks)):
            pass

    def _is_at_work(self, model: Model) -> bool:
        """Whether a model's experts are computed by this run."""
        return model is not self.context.original or not self.context.passed.has_experts

    def _summed(self, model: Model, chunk: int) -> torch.Tensor:
        return model.stream.latent[1].read(*self._chunk_rows(chunk)).to(self.context.device)

    def _middle(self, model: Model, chunk: int) -> torch.Tensor:
        return model.stream.middle.read(*self._chunk_rows(chunk)).to(self.context.device)

    def _add(self, model: Model, way: Way, chunk: int, output: torch.Tensor, name: str) -> None:
        """Add the output of a chunk to the hidden states."""
        start, stop = self._chunk_rows(chunk)
        after = model.stream.after(self.number)
        shares = None if way.shares is None else way.shares[start:stop]
        hidden = joined(after.read(start, stop), to_cpu(output), shares)
        refuse_nonfinite(hidden, name)
        after.write(start, hidden)
