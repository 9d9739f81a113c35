"""Decoded weights of models that go through a text in step: rows that are the same bytes are decoded once.

Files of one base often agree in some tensors: these have the same type, and were made with the same
importances. The models of an evaluation read a layer one after the other. So what one has decoded is kept
until the last of them that could want it has asked. Whether it fits is decided by the bytes alone, which
every model reads for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

from quantize.fill.sources import FLOAT_DTYPES, SourceTensor

KEPT_BYTES = 512 << 20
"""Budget for what is kept: a layer of a model with billions of weights, of a larger one a part."""

_Part = tuple[str, int, int, torch.dtype]
"""Name of a tensor, its first row and the one behind the last, and what they are decoded to."""


@dataclass(frozen=True)
class _Kept:
    """Rows that were decoded.

    raw     their bytes
    n_left  models that may still ask for them
    """

    raw: npt.NDArray[np.uint8]
    rows: torch.Tensor
    n_left: int

    @property
    def n_bytes(self) -> int:
        return self.raw.nbytes + self.rows.nbytes


class SharedWeights:
    """What some models have decoded for each other.

    models     the tensors of each, by name
    max_bytes  of what is kept; beyond it, rows are decoded again
    """

    def __init__(self, models: Iterable[Mapping[str, SourceTensor]], max_bytes: int = KEPT_BYTES) -> None:
        self._n_models = Counter(_kind(tensor) for tensors in models for tensor in tensors.values())
        self._max_bytes = max_bytes
        self._kept: dict[_Part, _Kept] = {}
        self._lock = Lock()

    @property
    def n_bytes(self) -> int:
        """Size of what is kept."""
        return sum(kept.n_bytes for kept in self._kept.values())

    def rows(
        self,
        tensor: SourceTensor,
        start: int,
        stop: int,
        dtype: torch.dtype,
        decode: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Return rows `start` to `stop` of a model's tensor, which nobody may change.

        decode  returns them, for rows that no other model has decoded
        """
        n_models = self._n_models[_kind(tensor)]
        if n_models < 2 or tensor.type in FLOAT_DTYPES or tensor.type.rows_interleaved > 1:
            return decode()
        part, raw = (tensor.name, start, stop, dtype), tensor.raw_rows(start, stop)
        with self._lock:
            kept = self._kept.pop(part, None)
        is_same = kept is not None and np.array_equal(kept.raw, raw)
        rows = kept.rows if kept is not None and is_same else decode()
        fresh = _Kept(raw, rows, (n_models if kept is None else kept.n_left) - 1)
        with self._lock:
            if fresh.n_left and self.n_bytes + fresh.n_bytes <= self._max_bytes:
                self._kept[part] = fresh
        return rows

    def forget(self) -> None:
        """Keep nothing: all models have had the layer."""
        with self._lock:
            self._kept.clear()


def _kind(tensor: SourceTensor) -> tuple[str, str, tuple[int, ...]]:
    """Name, type and shape, which are alike for tensors that may be the same bytes."""
    return tensor.name, tensor.type.name, tensor.shape
