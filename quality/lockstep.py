"""Several models on the way through one text, in step: layer after layer, each by all models in turn.

The base computes a layer first. Every other model follows, and is compared with the base at once, while the
hidden states of both are there. What was measured is recorded together with the layer in the model's work
folder. So a run that is killed at any moment finds the base one layer ahead of the others at most, and its
hidden states after that layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forward.layer import run_layer
from forward.logits import Head, Positions
from forward.observe import Arrays
from forward.perplexity import predicted_positions
from forward.run import ForwardPass
from gguf_tools.errors import BadActivation
from quality.drift import LayerDrift, Routes, drift_of


@dataclass(frozen=True)
class Lockstep:
    """A base, and models that are compared with it; all of them on the same text."""

    base: ForwardPass
    models: Sequence[ForwardPass]

    @property
    def n_layers_done(self) -> int:
        """Number of layers that earlier runs have left, of all models together."""
        return sum(max(0, each.folder.done + 1) for each in (self.base, *self.models))

    def run(self) -> None:
        """Compute the layers that are not done.

        raises  BadActivation naming model, layer and tensor for NaN or infinity; finished layers stay
        """
        positions = predicted_positions(self.base.text)
        for layer in range(self._first_missing(), self.base.source.network.n_layers):
            if self.base.folder.done < layer:
                _finish(self.base, layer, _compute(self.base, layer))
            for model in self.models:
                if model.folder.done < layer:
                    _finish(model, layer, self._compare(model, layer, positions).arrays())

    def drift(self, model: ForwardPass) -> tuple[LayerDrift, ...]:
        """Return the drift of a model that has been computed, by layer."""
        layers = range(model.source.network.n_layers)
        return tuple(LayerDrift.of(layer, model.folder.arrays(layer)) for layer in layers)

    def heads(self) -> list[Head]:
        """Return the ends of all models, the base's first."""
        return [
            Head(each.load, each.last(), each.output_norm(), each.source.network.output)
            for each in (self.base, *self.models)
        ]

    def _first_missing(self) -> int:
        return min(each.folder.done for each in (self.base, *self.models)) + 1

    def _compare(self, model: ForwardPass, layer: int, positions: Positions) -> LayerDrift:
        routes = _compute(model, layer)
        return drift_of(
            layer,
            positions,
            self.base.states.after(layer),
            model.states.after(layer),
            self.base.folder.arrays(layer),
            routes,
        )


def _compute(model: ForwardPass, layer: int) -> Arrays:
    """Compute one layer, and return where its tokens went."""
    routes = Routes()
    try:
        run_layer(model.sweep, layer, *model.states.around(layer), routes)
    except BadActivation as error:
        raise BadActivation(f"{model.source.path}: {error}") from error
    return routes.arrays()


def _finish(model: ForwardPass, layer: int, arrays: Arrays) -> None:
    model.states.save(layer)
    model.folder.finish_layer(layer, arrays)
