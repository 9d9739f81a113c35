"""Bases of comparisons: another model, states of it that an earlier run has kept, or its logits.

All three have logits. The first two have hidden states after every layer, too, from which drift is measured.

Several models go through one text in step: layer after layer, each computed by all models in turn.

The base computes a layer first. Every other model follows, and is compared with the base at once, while the
hidden states of both are there. What was measured is recorded together with the layer in the model's work
folder. So a run that is killed at any moment finds the base one layer ahead of the others at most, and its
hidden states after that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from gguf_tools.errors import BadActivation
from imatrix.evaluate.bases.cached_states import StatesKeeper
from imatrix.evaluate.drift import LayerDrift, RouteObserver, drift_of
from imatrix.forward.hidden_states import Rows
from imatrix.forward.layer import Layer
from imatrix.forward.layers.load import Loader
from imatrix.forward.logits import Head, LogitSource, Positions, predicted_positions
from imatrix.forward.observe import Arrays
from imatrix.forward.open import ModelSource
from imatrix.forward.options import ForwardOptions, Rounded
from imatrix.forward.run import ForwardPass
from imatrix.texts.chunks import Chunks
from quantize.padding.hidden_size import n_hidden_zeros


@dataclass(frozen=True)
class Entrant:
    """A model that goes through the text; `rounded` is that of ForwardOptions."""

    source: ModelSource
    rounded: Rounded | None = None


@dataclass(frozen=True)
class BaseWeights:
    """The weights of a base that is there, whether or not it is computed.

    build  layer number -> the layer, with its weights
    """

    load: Loader
    build: Callable[[int], Layer]

    @staticmethod
    def of(source: ModelSource, chunks: Chunks, options: ForwardOptions) -> BaseWeights:
        """Return the weights of an open model for these chunks."""
        load, network = source.loader_for(options), source.network
        rotate = network.rope.rotation(chunks.longest, load.device)
        return BaseWeights(load, lambda number: network.build(load, number, rotate))


class LayeredBase(Protocol):
    """A base whose hidden states are known after every layer, for the measured tokens at least.

    n_layers       without its MTP layer
    n_layers_done  layers that need not be computed any more
    """

    @property
    def n_layers(self) -> int: ...

    @property
    def n_layers_done(self) -> int: ...

    def compute(self, layer: int) -> None:
        """See to it that the layer is computed."""

    def after(self, layer: int) -> Rows:
        """Return the hidden states after the layer that was computed last."""

    def routes(self, layer: int) -> Arrays:
        """Return the experts chosen in a layer, as `RouteObserver.arrays` does."""

    def head(self) -> LogitSource:
        """The base's logits, once all layers are computed."""

    @property
    def has_draft(self) -> bool:
        """Whether it has an MTP layer: the one behind the others, for `compute`."""

    @property
    def is_kept(self) -> bool:
        """Whether its states are kept for later runs, which may want its drafts."""

    def draft_head(self) -> LogitSource:
        """The logits of its MTP layer, once that is computed."""


@dataclass(frozen=True)
class ComputedBase:
    """A model that goes through the text before the others.

    keeper  is given every layer; None where nothing is kept
    """

    forward: ForwardPass
    keeper: StatesKeeper | None = None

    @property
    def n_layers(self) -> int:
        return self.forward.source.network.n_layers

    @property
    def n_layers_done(self) -> int:
        return max(0, self.forward.folder.done + 1)

    def compute(self, layer: int) -> None:
        if self.forward.folder.done >= layer:
            return
        routes = compute_layer(self.forward, layer)
        if self.keeper is not None:
            self.keeper.keep_layer(layer, self.after(layer), routes)
        self.forward.states.finish(layer, routes)

    def after(self, layer: int) -> Rows:
        return self.forward.states.after(layer)

    def routes(self, layer: int) -> Arrays:
        return self.forward.folder.arrays(layer)

    def head(self) -> LogitSource:
        if self.keeper is not None:
            self.keeper.keep_head(self.forward)
        return head_of(self.forward)

    @property
    def is_kept(self) -> bool:
        return self.keeper is not None

    @property
    def has_draft(self) -> bool:
        return self.forward.source.network.n_mtp > 0

    def draft_head(self) -> LogitSource:
        return self.forward.draft_head()


def compute_layer(model: ForwardPass, layer: int) -> Arrays:
    """Compute one layer, and return where its tokens went.

    raises  BadActivation naming model, layer and tensor for NaN or infinity
    """
    routes = RouteObserver()
    try:
        model.compute(layer, routes)
    except BadActivation as error:
        raise BadActivation(f"{model.source.path}: {error}") from error
    return routes.arrays()


def head_of(model: ForwardPass) -> LogitSource:
    """The logits of a model whose layers have been computed."""
    return Head.of(model.source.network, model.load, model.last())


@dataclass(frozen=True)
class Lockstep:
    """A base, and models that are compared with it; all of them on the same text.

    base       None where only logits of it are known: then no drift is measured
    base_head  returns what gives the base's logits, once all layers are computed
    weights    of the base; None where they are not there
    """

    base: LayeredBase | None
    base_head: Callable[[], LogitSource]
    models: Sequence[ForwardPass]
    weights: BaseWeights | None = None

    @property
    def n_layers_done(self) -> int:
        """Number of layers that need not be computed any more, of all models together."""
        base = 0 if self.base is None else self.base.n_layers_done
        return base + sum(max(0, each.folder.done + 1) for each in self.models)

    @property
    def n_layers_in_all(self) -> int:
        n_drafts = len(self.drafting) + self._base_drafts
        return sum(self._layers_of_all()) + n_drafts

    def _layers_of_all(self) -> list[int]:
        """Return how many layers the models have, and the base, where its layers are known."""
        own = [each.source.network.n_layers for each in self.models]
        return own if self.base is None else [*own, self.base.n_layers]

    def _is_like_base(self, model: ForwardPass) -> bool:
        """Whether a model has as many layers as the base."""
        return self.base is not None and model.source.network.n_layers == self.base.n_layers

    @cached_property
    def drafting(self) -> tuple[ForwardPass, ...]:
        """The models whose MTP layer is compared with the base's."""
        if self.base is None or not self.base.has_draft:
            return ()
        alike = filter(self._is_like_base, self.models)
        return tuple(each for each in alike if each.source.network.n_mtp and not each.load.is_rounded)

    @property
    def _base_drafts(self) -> bool:
        """Whether the base's MTP layer is computed."""
        if self.base is None or not self.base.has_draft:
            return False
        return bool(self.drafting) or self.base.is_kept

    def run(self) -> None:
        """Compute the layers that are not done.

        raises  BadActivation naming model, layer and tensor for NaN or infinity; finished layers stay
        """
        chunks = self.models[0].chunks
        positions = predicted_positions(chunks)
        parts = [positions.within(part) for part in chunks.parts]
        for layer in range(self._first_missing(), max(self._layers_of_all())):
            if self.base is not None and layer < self.base.n_layers:
                self.base.compute(layer)
            for model in self.models:
                if model.folder.done < layer < model.source.network.n_layers:
                    routes = compute_layer(model, layer)
                    model.states.finish(layer, self._drift(model, layer, parts, routes))
            self._forget_weights()
        self._draft()

    def _draft(self) -> None:
        """Compute the MTP layers that are not done."""
        if self.base is None or not self._base_drafts:
            return
        layer = self.base.n_layers
        self.base.compute(layer)
        for model in self.drafting:
            if model.folder.done < layer:
                compute_layer(model, layer)
                model.states.finish(layer, {})
        self._forget_weights()

    def draft_heads(self) -> list[LogitSource]:
        """Return the ends of the base's MTP layer and of the models' in `drafting`; nothing without these."""
        if self.base is None or not self.drafting:
            return []
        return [self.base.draft_head(), *(model.draft_head() for model in self.drafting)]

    def drift(self, model: ForwardPass, part: int) -> tuple[LayerDrift, ...]:
        """Return the drift of a computed model by layer; nothing where the base has no such layers.

        part  number of the text's part that it is measured on
        """
        if self.base is None or not self._is_like_base(model):
            return ()
        arrays = map(model.folder.arrays, range(self.base.n_layers))
        return tuple(LayerDrift.of(layer, each, part) for layer, each in enumerate(arrays))

    def heads(self) -> list[LogitSource]:
        """Return the ends of all models but the base."""
        return [head_of(model) for model in self.models]

    def _first_missing(self) -> int:
        done = [model.folder.done for model in self.models]
        if self.base is not None:
            done.append(self.base.n_layers_done - 1)
        return max(0, min(done) + 1)

    def _forget_weights(self) -> None:
        """Free what models have decoded for others that did not need it."""
        for model in self.models:
            if model.load.shared is not None:
                model.load.shared.forget()

    def _drift(self, model: ForwardPass, layer: int, parts: Sequence[Positions], routes: Arrays) -> Arrays:
        """Measure a model's drift on each part, for its work folder; {} where the base has no such layers."""
        base = self.base
        if base is None or not self._is_like_base(model):
            return {}
        network = model.source.network
        states, base_routes = (base.after(layer), model.states.after(layer)), base.routes(layer)
        n_cols = network.n_strands * network.hidden_size - n_hidden_zeros(model.source.metadata)
        drifts = [drift_of(layer, part, *states, base_routes, routes, n_cols=n_cols) for part in parts]
        return LayerDrift.arrays(drifts)
