"""Scales on their way downhill, by the relative change of each: a scale s becomes s * (1 + change).

A step is the running mean of gradients, divided by the running mean of their squares plus the mean of those
squares over the tensor. The squares estimate the curvature, which differs by orders of magnitude between the
scales of a tensor. Where they are small, they are mostly noise, and the second term keeps the step small.
Adam (Kingma and Ba, arXiv 1412.6980) divides by the root, so scales without a gradient to speak of move as
fast as all others, at random: on the sample model it gained half as much.

Errors halve with each bit of a type, and so does what a scale can make up for: steps are shorter by as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from imatrix.calibrate.refine.codes import ChangedTensor
from imatrix.calibrate.refine.scales import RowScales
from quantize.fill.sources import SourceTensor
from quantize.formats.base import Bytes, Floats32

_MEAN, _SQUARE = 0.9, 0.95
"""Decays of the two running means, for runs of a few dozen steps."""

_BITS = 2.5
"""Bits per weight at which steps have the length that they are given."""

_LARGEST = 0.5
"""Relative change at which a scale stops."""


class RefinedTensor(ChangedTensor):
    """A stored tensor whose scales change.

    changes  float32 (n_rows, n_groups, n_fields): the relative change of each scale
    """

    def __init__(self, tensor: SourceTensor, scales: RowScales) -> None:
        self.tensor, self.scales = tensor, scales
        self.n_rows = math.prod(tensor.shape[:-1])
        self.changes: Floats32 = np.zeros((self.n_rows, *scales.shape), np.float32)

    def stored_rows(self, start: int, stop: int) -> Bytes:
        rows = self.tensor.raw_rows(start, stop).reshape(stop - start, -1)
        return self.scales.replaced(rows, self.scales.read(rows) * (1 + self.changes[start:stop]))


@dataclass(frozen=True)
class RowGradients:
    """The derivative of a loss by the changes of some of a tensor's rows.

    first   the first row
    values  float32 (n_rows, n_groups, n_fields)
    """

    tensor: str
    first: int
    values: Floats32


@dataclass
class Descent:
    """The moving scales of a file, and two running means of each.

    tensors  by name
    n_steps  steps that were made
    """

    tensors: Mapping[str, RefinedTensor]
    n_steps: int = 0
    _means: dict[str, Floats32] = field(init=False)
    _squares: dict[str, Floats32] = field(init=False)

    def __post_init__(self) -> None:
        self._means = {name: np.zeros_like(each.changes) for name, each in self.tensors.items()}
        self._squares = {name: np.zeros_like(each.changes) for name, each in self.tensors.items()}

    def step(self, gradients: Iterable[RowGradients], rate: float) -> None:
        """Make one step. Gradients of the same rows add up; rows without any have one of zero."""
        self.n_steps += 1
        by_tensor: dict[str, list[RowGradients]] = {}
        for each in gradients:
            by_tensor.setdefault(each.tensor, []).append(each)
        of_mean, of_square = 1 - _MEAN**self.n_steps, 1 - _SQUARE**self.n_steps
        for name, tensor in self.tensors.items():
            gradient = np.zeros_like(tensor.changes)
            for some in by_tensor.get(name, ()):
                gradient[some.first : some.first + len(some.values)] += some.values
            mean, square = self._means[name], self._squares[name]
            mean += (1 - _MEAN) * (gradient - mean)
            square += (1 - _SQUARE) * (np.square(gradient) - square)
            typical = square.mean()
            if typical > 0:
                length = rate * 2.0 ** min(0.0, _BITS - tensor.type.bits_per_weight)
                length *= math.sqrt(typical * of_square) / of_mean
                tensor.changes -= np.float32(length) * mean / (square + typical)
                np.clip(tensor.changes, -_LARGEST, _LARGEST, out=tensor.changes)

    def changes(self) -> dict[str, Floats32]:
        """Return a copy of all changes, by tensor."""
        return {name: tensor.changes.copy() for name, tensor in self.tensors.items()}

    def set_changes(self, changes: Mapping[str, Floats32]) -> None:
        """Go to where `changes` were taken."""
        for name, tensor in self.tensors.items():
            tensor.changes[:] = changes[name]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all that a run needs to go on, for a file."""
        kept: dict[str, npt.NDArray[Any]] = {"steps": np.array(self.n_steps)}
        for label, each in self._parts():
            kept |= {f"{label}:{name}": values for name, values in each.items()}
        return kept

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from what `arrays` returned."""
        self.n_steps = int(arrays["steps"])
        for label, each in self._parts():
            for name, values in each.items():
                values[:] = arrays[f"{label}:{name}"]

    def _parts(self) -> Iterable[tuple[str, dict[str, Floats32]]]:
        yield "change", {name: tensor.changes for name, tensor in self.tensors.items()}
        yield "mean", self._means
        yield "square", self._squares
