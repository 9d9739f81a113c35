"""Changes of MLX to the weights of models with convolutions, undone.

When mlx-lm first reads such a model, it moves the last axis of its kernels: (rows, 1, size) become
(rows, size, 1). In the same pass it adds one to the norms that are stored less one, those of Qwen3-Next and
Qwen 3.5. So the shape of a kernel shows what the norms are (mlx-lm 0.32, `sanitize` of these models).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from convert.architectures.rules import Renamed, Rule, plus_one, renamed
from convert.weights.base import Weight, Weights

KERNEL = ".conv1d.weight"


@dataclass(frozen=True)
class MovedBack(Renamed):
    """A kernel of MLX, (rows, size, 1), as all others store it: (rows, 1, size). The numbers lie the same."""

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        size = self.shape[-1]
        return self.weight.read_rows(start * size, stop * size).reshape(-1, size)


def moved_back(weight: Weight) -> MovedBack:
    """Return a kernel of MLX as all others store it."""
    rows, size, _ = weight.shape
    return MovedBack(weight.name, (rows, 1, size), weight.type, weight)


def is_moved(name: str, weight: Weight) -> bool:
    """Return whether a weight is a kernel whose last axis MLX has moved."""
    shape = weight.shape
    return name.endswith(KERNEL) and len(shape) == 3 and shape[-1] == 1 and shape[1] > 1


def has_moved(model: Weights) -> bool:
    """Return whether a model has such a kernel."""
    return any(name.endswith(KERNEL) and is_moved(name, model.weight(name)) for name in model.names())


def with_whole_norms(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return the rules for norms that are not stored less one."""
    return tuple(
        replace(rule, outputs=tuple(
            replace(output, arrange=renamed) if output.arrange is plus_one else output
            for output in rule.outputs
        ))
        for rule in rules
    )  # fmt: skip
