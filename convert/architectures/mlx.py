"""Changes of MLX to the weights of models with convolutions, undone.

When mlx-lm first reads such a model, it moves the last axis of its kernels: (rows, 1, size) become
(rows, size, 1). In the same pass it adds one to the norms that are stored less one, those of Qwen3-Next and
Qwen 3.5. So the shape of a kernel shows what the norms are (mlx-lm 0.32, `sanitize` of these models).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from convert.architectures.rules import Rule, plus_one, renamed
from convert.weights.base import Weight, Weights
from gguf_tools.format.ggml_types import GGMLType

KERNEL = ".conv1d.weight"


@dataclass(frozen=True)
class MovedBack:
    """A kernel of MLX, (rows, size, 1), as all others store it: (rows, 1, size). The numbers lie the same."""

    weight: Weight

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def shape(self) -> tuple[int, ...]:
        rows, size, _ = self.weight.shape
        return rows, 1, size

    @property
    def type(self) -> GGMLType:
        return self.weight.type

    @property
    def stored_as(self) -> str:
        return self.weight.stored_as

    @property
    def by_rows(self) -> bool:
        return self.weight.by_rows

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        size = self.shape[-1]
        return self.weight.read_rows(start * size, stop * size).reshape(-1, size)


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
