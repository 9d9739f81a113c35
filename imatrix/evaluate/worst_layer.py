"""The layer where a model moves farthest from its base, and how far each of that layer's tensors is off.

Drift tells the layer. Which tensor it is shows in the weights themselves, and only one layer's have to be
read once more. A tensor that was damaged stands out among its neighbours of the same type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

from gguf_tools.format.ggml_types import I32
from imatrix.evaluate.bases.base import BaseWeights
from imatrix.evaluate.drift import LayerDrift
from imatrix.forward.layers.attention.mla import LatentAttention
from imatrix.forward.network import EMBEDDINGS
from imatrix.forward.run import ForwardPass

_RUN_BYTES = 16 << 20
"""Size in float32 of the rows that are compared at a time."""


@dataclass(frozen=True)
class TensorError:
    """How far a tensor's weights are from the base's: norm of the difference over the norm of the base's."""

    name: str
    type: str
    error: float


@dataclass(frozen=True)
class WorstLayer:
    """The layer that adds most to a model's drift.

    tensors  the layer's, and those of the output, which no drift shows; the largest error comes first.
             Nothing where the base's weights were not read
    """

    layer: int
    tensors: tuple[TensorError, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the layer as JSON data."""
        return {"layer": self.layer, "tensors": [asdict(each) for each in self.tensors]}


class WorstLayers:
    """Finds the layers that add most to the drift of `model` on several texts, mostly one and the same.

    base  None where its weights are not there: then no tensors are compared
    """

    def __init__(self, base: BaseWeights | None, model: ForwardPass) -> None:
        self._base, self._model = base, model
        self._known: dict[int, WorstLayer] = {}

    def of(self, layers: Sequence[LayerDrift]) -> WorstLayer | None:
        """Find the layer that adds most to a drift, the first one if it is 0; None without layers."""
        if not layers:
            return None
        worst = max(range(len(layers)), key=lambda number: _added(layers, number))
        if worst not in self._known:
            self._known[worst] = WorstLayer(worst, tuple(self._errors(worst)))
        return self._known[worst]

    def _errors(self, layer: int) -> Sequence[TensorError]:
        base, model = self._base, self._model
        if base is None:
            return ()
        errors = [*_errors_by_name(base, model, layer), *_errors_of_heads(base, model, layer)]
        return sorted(errors, key=lambda error: -error.error)


def _added(layers: Sequence[LayerDrift], number: int) -> float:
    """Compute a layer's own drift, squared: independent errors add up as squares do."""
    before = layers[number - 1].drift if number else 0.0
    return layers[number].drift ** 2 - before**2


def _errors_by_name(base: BaseWeights, model: ForwardPass, layer: int) -> Iterator[TensorError]:
    """Yield the errors of tensors that both models have under the same name."""
    wanted = {model.source.network.output_norm, model.source.network.output}
    if layer == 0:
        wanted.add(EMBEDDINGS)
    for name, tensor in model.source.tensors.items():
        if (name in wanted or name.startswith(f"blk.{layer}.")) and base.load.has(name):
            error = _error_of_tensor(base, model, name)
            if error is not None:
                yield TensorError(name, tensor.type.name, error)


def _error_of_tensor(base: BaseWeights, model: ForwardPass, name: str) -> float | None:
    """Return the error of a tensor; None where the rows of both models differ in number or length.

    A table of whole numbers has none, either.
    """
    reference, tensor = base.load.tensor(name), model.load.tensor(name)
    if tensor.type == I32:
        return None
    n_rows, n_cols = prod(tensor.shape[:-1]), tensor.shape[-1]
    if (prod(reference.shape[:-1]), reference.shape[-1]) != (n_rows, n_cols):
        return None
    step = max(1, _RUN_BYTES // (4 * n_cols))
    difference = norm = 0.0
    for start in range(0, n_rows, step):
        stop = min(n_rows, start + step)
        expected = base.load.rows(reference, start, stop, torch.float32)
        found = model.load.rows(tensor, start, stop, torch.float32)
        difference += float((found - expected).double().square().sum())
        norm += float(expected.double().square().sum())
    return _relative(difference, norm)


def _errors_of_heads(base: BaseWeights, model: ForwardPass, layer: int) -> Iterator[TensorError]:
    """Yield the errors of keys and values where the models have them in different layouts."""
    whole = f"blk.{layer}.attn_kv_b.weight"
    if base.load.has(whole) and model.load.has(whole):
        return
    reference, attention = base.build(layer).attention, model.sweep.build(layer).attention
    if not (isinstance(reference, LatentAttention) and isinstance(attention, LatentAttention)):
        return
    for part, expected, found in (
        ("k", reference.keys, attention.keys),
        ("v", reference.values, attention.values),
    ):
        name = f"blk.{layer}.attn_{part}_b.weight"
        if not model.load.has(name):
            name = whole
        if base.load.has(name):
            continue
        error = _relative(
            float((found - expected).double().square().sum()), float(expected.double().square().sum())
        )
        yield TensorError(name, model.load.tensor(name).type.name, error)


def _relative(difference: float, norm: float) -> float:
    """Return the root of a quotient of sums of squares."""
    return math.sqrt(difference / norm) if norm else (math.inf if difference else 0.0)
