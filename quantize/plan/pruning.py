"""Pruning: leaving out whole layers and closing the gaps.

The layers that stay are renumbered from 0 in their old order. Importances are still looked up by the old
names. The file's `block_count` becomes the number of layers that stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gguf_tools.errors import BadRequest
from quantize.roles import in_layer, layer_of


@dataclass(frozen=True)
class Pruning:
    """Which layers stay.

    kept  old numbers of the layers that stay; a layer's place in the tuple is its new number
    """

    kept: tuple[int, ...]

    @classmethod
    def of(cls, names: Iterable[str], pruned: Sequence[int]) -> Pruning:
        """Return the pruning that drops the layers `pruned` from a model with the tensors `names`.

        raises  BadRequest for a layer that the model does not have, or when none would stay
        """
        layers = sorted({layer for name in names if (layer := layer_of(name)) is not None})
        unknown = sorted(set(pruned) - set(layers))
        if unknown:
            raise BadRequest(f"can't prune layers {unknown}: the model has layers {_span(layers)}")
        kept = tuple(layer for layer in layers if layer not in set(pruned))
        if not kept:
            raise BadRequest(f"can't prune all layers of the model ({_span(layers)})")
        return cls(kept)

    def new_name(self, name: str) -> str | None:
        """Return the output's name for the tensor `name`, or None when its layer is dropped."""
        layer = layer_of(name)
        if layer is None:
            return name
        return in_layer(name, self.kept.index(layer)) if layer in self.kept else None


def _span(layers: Sequence[int]) -> str:
    return f"{layers[0]} to {layers[-1]}" if layers else "none"
