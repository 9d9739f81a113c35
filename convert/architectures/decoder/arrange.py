"""Weights whose numbers are mapped one by one: norms that a checkpoint stores less one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.architectures.rules import OutputTensor, Renamed
from convert.weights.base import Weight
from gguf_tools.format.ggml_types import F32


@dataclass(frozen=True, eq=False)
class Mapped(Renamed):
    """A weight whose numbers are mapped one by one, float32."""

    function: Callable[[np.ndarray], np.ndarray]

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.function(super().read_rows(start, stop))

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        return self.read_rows(start, stop).reshape(-1).view(np.uint8)


def plus_one(name: str, weights: Sequence[Weight], config: Any) -> OutputTensor:
    """Return the weight of a norm, which a checkpoint stores less one."""
    (weight,) = weights
    return Mapped(name, weight.shape, F32, weight, _plus_one)


def _plus_one(numbers: np.ndarray) -> np.ndarray:
    return numbers + np.float32(1)
