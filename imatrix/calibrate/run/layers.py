"""One layer: the inputs of its matrices are gathered, they are encoded, and the hidden states go on.

With the original alone, one pass over the chunks gathers the inputs of all matrices of the attention. Where
the model that is being written follows, matrices are encoded in stages: each sees what the ones before it, as
they stand in the output, have made of the text. A stage is another pass, which ends once the inputs of its
matrices are known. The block after the attention is encoded in the same way from the rows in `middle`, and
experts one by one (see experts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from imatrix.calibrate.run.context import Model, RunContext
from imatrix.calibrate.run.experts import MIDDLE, ExpertRun
from imatrix.calibrate.statistics.inputs import Activations, Capture, Inputs, Order, Seen, WeightsOf, gather
from imatrix.forward.device import to_cpu
from imatrix.forward.layer import Layer, refuse_nonfinite
from imatrix.forward.layers.ffn import BlockNames
from imatrix.forward.layers.residual import joined
from imatrix.forward.observe import Observer, Silent
from imatrix.forward.sweep import Routes
from imatrix.forward.workers import give_back


@dataclass(frozen=True)
class _Way:
    """How a model's tokens go past the block of a layer.

    routes  where they go; None for a layer without routed experts
    shares  see `imatrix.forward.layers.residual.ResidualStream`, on the CPU
    """

    routes: Routes | None
    shares: torch.Tensor | None

    @classmethod
    def joined(cls, ways: Sequence[_Way]) -> _Way:
        routes = [way.routes for way in ways if way.routes is not None]
        shares = [way.shares for way in ways if way.shares is not None]
        return cls(Routes.joined(routes) if routes else None, torch.cat(shares) if shares else None)


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
        ways = self._attend()
        give_back()
        shared = self._gather_middle()
        self._block(shared, ways)
        give_back()
        if self.original.experts is not None:
            layers = (model.layer(self.number) for model in self.context.models)
            experts = [layer.experts for layer in layers if layer.experts is not None]
            routes = [way.routes for way in ways if way.routes is not None]
            ExpertRun(self.context, self.number, experts, routes, shared).run()
            give_back()

    def _layers(self) -> list[Layer]:
        """Return the layer of every model, as it is now, without its block."""
        others = (replace(model.layer(self.number), block=None) for model in self.context.models[1:])
        return [self.original, *others]

    def _chunk_rows(self, chunk: int) -> tuple[int, int]:
        size = self.context.holdout.chunk_size
        return chunk * size, (chunk + 1) * size

    def _gather(self, take: Callable[[int], Sequence[Activations]]) -> Inputs:
        context = self.context
        drifts = context.corrects_drift
        return gather(context.holdout, take, context.workers, drifts=drifts, weights=self.weights)

    # ---- attention

    def _attend(self) -> list[_Way]:
        """Encode the matrices up to the block, fill `middle` and `after`; return each model's way past it."""
        context = self.context
        if not context.is_followed:
            inputs, ways = self._pass(self._missing(self._order()))
            for names in inputs.moments:
                context.make(inputs, names, names)
            return ways
        stages = [self._missing([names]) for names in self._order()]
        for stage in filter(None, stages):
            inputs = self._stage(stage)
            for names in inputs.moments:
                context.make(inputs, names, names)
        return self._pass(())[1]

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

    def _missing(self, groups: Iterable[Iterable[str]]) -> list[str]:
        return [name for names in groups for name in names if self.context.is_missing(name)]

    def _stage(self, wanted: Collection[str]) -> Inputs:
        """Return the inputs of the wanted matrices, without computing what comes after them."""
        context, layers = self.context, self._layers()

        def take(chunk: int) -> list[Activations]:
            shown: list[Activations] = []
            for model, layer in zip(context.models, layers, strict=True):
                capture = Capture(wanted, stop=True)
                with suppress(Seen):
                    layer.attention_block(self._entered(model, layer, chunk, capture), capture)
                shown.append(capture.inputs())
            return shown

        return self._gather(take)

    def _pass(self, wanted: Collection[str]) -> tuple[Inputs, list[_Way]]:
        """Compute the attention of all models up to `middle`.

        returns  the inputs of the wanted matrices, and each model's way past the block
        """
        context, layers = self.context, self._layers()
        by_chunk: list[dict[int, _Way]] = [{} for _ in layers]

        def take(chunk: int) -> list[Activations]:
            shown: list[Activations] = []
            for model, layer, ways in zip(context.models, layers, by_chunk, strict=True):
                capture = Capture(wanted)
                ways[chunk] = self._attend_chunk(model, layer, chunk, capture)
                shown.append(capture.inputs())
            return shown

        inputs = self._gather(take)
        return inputs, [_Way.joined([own[chunk] for chunk in sorted(own)]) for own in by_chunk]

    def _attend_chunk(self, model: Model, layer: Layer, chunk: int, observer: Observer) -> _Way:
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
        return _Way(routes, None if passage.shares is None else to_cpu(passage.shares))

    # ---- what every token goes through

    def _gather_middle(self) -> Inputs:
        """Return the inputs of gate and up, of the block and of all experts together; nothing where all of
        them are written."""
        context = self.context
        experts = None if self.original.experts is None else self.original.experts.names
        names = [each for each in (self.block, experts) if each is not None]

        def take(chunk: int) -> list[Activations]:
            rows = self._chunk_rows(chunk)
            middles = (model.stream.middle.read(*rows).to(context.device) for model in context.models)
            return [{MIDDLE: x[:, None]} for x in middles]

        if not self._missing(each.inputs for each in names):
            return Inputs(context.corrects_drift, self.weights)
        return self._gather(take)

    def _block(self, shared: Inputs, ways: Sequence[_Way]) -> None:
        """Encode the dense block or shared expert, and add its output to the hidden states."""
        context = self.context
        names = self.block
        if names is None:
            return
        context.make(shared, MIDDLE, names.inputs)
        blocks = [model.layer(self.number).block for model in context.models]

        def take(chunk: int) -> list[Activations]:
            shown: list[Activations] = []
            for each, (model, block) in enumerate(zip(context.models, blocks, strict=True)):
                assert block is not None
                x = self._middle(model, chunk)
                inner = block.gate_up(x, Silent())
                if each == 0:
                    self._add(model, ways[0], chunk, block.finish(inner, x, Silent()), names.down)
                else:
                    context.kept.keep(names.down, chunk, inner)
                shown.append({(names.down,): inner[:, None]})
            return shown

        inputs = self._gather(take)
        blocks.clear()
        context.make(inputs, (names.down,), (names.down,))
        del inputs
        if context.is_followed:
            own = context.own.layer(self.number).block
            assert own is not None

            def finish(chunk: int) -> None:
                x, inner = self._middle(context.own, chunk), context.kept.take(names.down, chunk)
                inner = own.gate_up(x, Silent()) if inner is None else inner
                self._add(context.own, ways[-1], chunk, own.finish(inner, x, Silent()), names.down)

            for _ in context.workers.each(finish, range(context.holdout.n_chunks)):
                pass

    def _middle(self, model: Model, chunk: int) -> torch.Tensor:
        return model.stream.middle.read(*self._chunk_rows(chunk)).to(self.context.device)

    def _add(self, model: Model, way: _Way, chunk: int, output: torch.Tensor, name: str) -> None:
        """Add the output of a chunk to the hidden states."""
        start, stop = self._chunk_rows(chunk)
        after = model.stream.after(self.number)
        shares = None if way.shares is None else way.shares[start:stop]
        hidden = joined(after.read(start, stop), to_cpu(output), shares)
        refuse_nonfinite(hidden, name)
        after.write(start, hidden)
