"""How weights of towers are arranged: patches that lie pixel by pixel, bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.architectures.decoder.arrange import Mapped
from convert.architectures.rules import OutputTensor, Renamed
from convert.weights.base import Weight
from gguf_tools.format.ggml_types import F32
from quantize.fill.sources import float_type


@dataclass(frozen=True, eq=False)
class PatchKernels(Renamed):
    """A matrix that multiplies patches, as kernels of a convolution: (rows, channels, patch, patch).

    A row of the matrix has a patch pixel by pixel, with the channels of a pixel side by side. A kernel has it
    channel by channel, so each row of the matrix becomes channels * patch rows here.
    """

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        _, channels, height, width = self.shape
        per_kernel = channels * height
        first, last = start // per_kernel, -(-stop // per_kernel)
        pixels = self.weight.read_rows(first, last).reshape(-1, height, width, channels)
        rows = pixels.transpose(0, 3, 1, 2).reshape(-1, width)
        return np.ascontiguousarray(rows[start - first * per_kernel : stop - first * per_kernel])

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        return self.read_rows(start, stop).reshape(-1).view(np.uint8)


def patch_kernels(name: str, weights: Sequence[Weight], config: Any) -> OutputTensor:
    """Return the kernels of a matrix that multiplies patches."""
    (weight,) = weights
    patch = config.patch_size
    return PatchKernels(name, (weight.shape[0], config.channels, patch, patch), float_type(weight), weight)


_LARGEST = np.finfo(np.float32).max


def bound(name: str, weights: Sequence[Weight], config: Any) -> OutputTensor:
    """Return a bound, which a checkpoint stores without a dimension, as a vector of one finite number."""
    (weight,) = weights
    return Mapped(name, (1,), F32, weight, _finite)


def _finite(numbers: np.ndarray) -> np.ndarray:
    """Replace infinities, which clip nothing, with the largest numbers, which clip nothing either."""
    return np.clip(numbers, -_LARGEST, _LARGEST)
