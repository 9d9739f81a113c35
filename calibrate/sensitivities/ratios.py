"""Ratios: the share of a tensor's sensitivity that calibrated encoding leaves, measured on a few of its rows.

Some rows of one matrix of every tensor are encoded with feedback under the second moments of what the matrix
multiplies. The divergence that they add, over what the stock encoder's add, is the ratio. The moments are
those of every other chunk, and the divergence is that of the chunks between: what fits the text alone does
not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from calibrate.rounding.factor import Factor
from calibrate.rounding.feedback import encode_compensated
from calibrate.rounding.judge import stock_weighting
from calibrate.sensitivities.type_errors import errors_of, read_rows, spread
from forward.device import to_numpy, to_torch
from forward.observe import Arrays, Observer, ObservesGradients, Silent
from gguf_tools.errors import BadMoments
from gguf_tools.format.ggml_types import IQ4_NL, Q3_K, GGMLType
from quantize.fill.sources import SourceTensor
from quantize.formats import get_decoder

_RATIO = "ratio:"
"""Prefix of arrays' names in the work folder; a tensor's name follows."""

_ROWS = 32
"""Number of rows that are encoded."""

_MOST_COLS = 8192
"""Number of columns up to which there is a ratio: moments of so many take 512 MB in float64."""

Floats32 = npt.NDArray[np.float32]
Floats64 = npt.NDArray[np.float64]


class Ratios(Silent):
    """An observer of a differentiated layer that measures the ratio of each tensor on its middle matrix.

    sources     tensors that would be encoded, by name
    chunk_size  tokens per chunk of the text
    """

    def __init__(self, sources: Mapping[str, SourceTensor], chunk_size: int) -> None:
        self._sources, self._chunk_size = sources, chunk_size
        self._chunks: list[int] = []
        self._sizes: list[int] = []
        self._rows: dict[str, npt.NDArray[np.int64]] = {}
        self._moments: dict[str, torch.Tensor] = {}
        self._gradients: dict[tuple[str, int], torch.Tensor] = {}

    def tokens(self, numbers: torch.Tensor) -> None:
        chunks, counts = torch.unique_consecutive(numbers // self._chunk_size, return_counts=True)
        self._chunks, self._sizes = chunks.tolist(), counts.tolist()

    def gradient(self, name: str, first: int, n_blocks: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
        number = n_blocks // 2 - first
        n_tokens, n_some, n_rows = gradient.shape
        if name not in self._sources or not 0 <= number < n_some or type_for(x.shape[-1]) is None:
            return
        rows = spread(n_rows, _ROWS)
        self._rows[name] = n_blocks // 2 * n_rows + rows
        multiplied = x[:, number if x.shape[1] > 1 else 0].float()
        g = gradient[:, number, to_torch(rows, gradient.device)].float()
        # A call may be about a part of the only chunk.
        sizes = self._sizes if n_tokens == sum(self._sizes) else [n_tokens]
        parts = zip(self._chunks, g.split(sizes), multiplied.split(sizes), strict=True)
        for chunk, theirs, inputs in parts:
            if chunk % 2:
                _add(self._gradients, (name, chunk), theirs.T @ inputs)
            else:
                _add(self._moments, name, (inputs.T @ inputs).double())

    def fresh(self) -> Self:
        return type(self)(self._sources, self._chunk_size)

    def merge(self, other: Self) -> None:
        self._rows |= other._rows
        for name, moments in other._moments.items():
            _add(self._moments, name, moments)
        for key, product in other._gradients.items():
            _add(self._gradients, key, product)

    def arrays(self) -> Arrays:
        """Return the ratios as `ratios_of` takes them."""
        return ratio_arrays({name: self._ratio(name) for name in self._rows if self._is_known(name)})

    def _is_known(self, name: str) -> bool:
        return name in self._moments and any(key[0] == name for key in self._gradients)

    def _ratio(self, name: str) -> float:
        gradients = [to_numpy(product) for key, product in self._gradients.items() if key[0] == name]

        def sensitivity(errors: Floats32) -> float:
            moved = [(errors * each).sum(-1, dtype=np.float64) for each in gradients]
            return float(np.sum(np.square(moved)))

        moments = to_numpy(self._moments[name])
        return ratio(read_rows(self._sources[name], self._rows[name]), moments, sensitivity)


Key = TypeVar("Key")


def _add(sums: dict[Key, torch.Tensor], key: Key, value: torch.Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value


def type_for(n_cols: int) -> GGMLType | None:
    """Return the type that ratios are measured at, None for rows that have none."""
    if n_cols > _MOST_COLS:
        return None
    return next((type_ for type_ in (Q3_K, IQ4_NL) if n_cols % type_.block_elems == 0), None)


def ratio(weights: Floats32, moments: Floats64, sensitivity: Callable[[Floats32], float]) -> float:
    """Return the share of the stock encoder's sensitivity that encoding with feedback leaves, 0 to 1.

    weights  float32 (n_rows, n_cols)
    moments  of what they multiply, float64 (n_cols, n_cols); 1 is returned where they can't be used
    sensitivity   of errors, float32 (n_rows, n_cols)
    """
    n_cols = weights.shape[1]
    type_ = type_for(n_cols)
    try:
        factor = Factor.of(moments)
    except BadMoments:
        return 1.0
    if type_ is None:
        return 1.0
    (stock,) = errors_of(weights, [type_], stock_weighting(factor))
    compensated = weights - get_decoder(type_)(encode_compensated(weights, type_, factor), n_cols)
    whole = sensitivity(stock)
    return min(1.0, sensitivity(compensated) / whole) if whole else 1.0


def ratio_arrays(ratios: Mapping[str, float]) -> Arrays:
    """Return ratios for the work folder."""
    return {f"{_RATIO}{name}": np.array(value) for name, value in ratios.items()}


def ratios_of(arrays: Arrays) -> dict[str, float]:
    """Return the ratios in `arrays` by tensor."""
    return {key.removeprefix(_RATIO): float(value) for key, value in arrays.items() if key.startswith(_RATIO)}


class GradientObserver(Observer, ObservesGradients, Protocol):
    """An observer that is shown gradients."""


class Together(Silent):
    """Several observers of a differentiated layer as one."""

    def __init__(self, observers: Sequence[GradientObserver]) -> None:
        self._observers = observers

    def tokens(self, numbers: torch.Tensor) -> None:
        for each in self._observers:
            each.tokens(numbers)

    def gradient(self, name: str, first: int, n_blocks: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
        for each in self._observers:
            each.gradient(name, first, n_blocks, x, gradient)

    def fresh(self) -> Self:
        return type(self)([each.fresh() for each in self._observers])

    def merge(self, other: Self) -> None:
        for mine, theirs in zip(self._observers, other._observers, strict=True):
            mine.merge(theirs)

    def refuse_nonfinite(self) -> None:
        for each in self._observers:
            each.refuse_nonfinite()

    def arrays(self) -> Arrays:
        return {key: value for each in self._observers for key, value in each.arrays().items()}
