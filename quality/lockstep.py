"""Several models go through one text in step: layer after layer, each computed by all models in turn.

The base computes a layer first. Every other model follows, and is compared with the base at once, while the
hidden states of both are there. What was measured is recorded together with the layer in the model's work
folder. So a run that is killed at any moment finds the base one layer ahead of the others at most, and its
hidden states after that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forward.logits import LogitSource, Positions, predicted_positions
from forward.observe import Arrays
from forward.run import ForwardPass
from quality.bases.base import BaseWeights, LayeredBase, compute_layer, head_of
from quality.drift import LayerDrift, drift_of


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
    def n_layers(self) -> int:
        """Number of layers of each model."""
        return self.models[0].source.network.n_layers

    @property
    def n_layers_done(self) -> int:
        """Number of layers that need not be computed any more, of all models together."""
        base = 0 if self.base is None else self.base.n_layers_done
        return base + sum(max(0, each.folder.done + 1) for each in self.models)

    @property
    def n_layers_in_all(self) -> int:
        return self.n_layers * (len(self.models) + (self.base is not None))

    def run(self) -> None:
        """Compute the layers that are not done.

        raises  BadActivation naming model, layer and tensor for NaN or infinity; finished layers stay
        """
        positions = predicted_positions(self.models[0].text)
        for layer in range(self._first_missing(), self.n_layers):
            if self.base is not None:
                self.base.compute(layer)
            for model in self.models:
                if model.folder.done < layer:
                    routes = compute_layer(model, layer)
                    model.states.finish(layer, self._drift(model, layer, positions, routes))
            self._forget_weights()

    def drift(self, model: ForwardPass) -> tuple[LayerDrift, ...]:
        """Return the drift of a model that has been computed, by layer; nothing without a layered base."""
        if self.base is None:
            return ()
        return tuple(LayerDrift.of(layer, model.folder.arrays(layer)) for layer in range(self.n_layers))

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

    def _drift(self, model: ForwardPass, layer: int, positions: Positions, routes: Arrays) -> Arrays:
        """Measure a model's drift, for its work folder; nothing without a layered base."""
        base = self.base
        if base is None:
            return {}
        network = model.source.network
        drift = drift_of(
            layer, positions, base.after(layer), model.states.after(layer), base.routes(layer), routes,
            n_cols=network.n_strands * network.hidden_size,
        )  # fmt: skip
        return drift.arrays()
