"""Quantization errors of a sample of each tensor's rows, for every candidate type.

Rows are encoded as the quantizer encodes them, with the importances of the columns. So the errors are those
that a file of stock encoding would have.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

from gguf_tools.format.ggml_types import GGMLType, by_name
from gguf_tools.format.tensors import TensorInfo
from imatrix.forward.device import to_numpy, to_torch
from quantize.fill.sources import SourceTensor
from quantize.formats import get_decoder, get_format
from quantize.formats.codecs import CODECS, requires_importances
from quantize.importances.entries import Importances, ResolvedImportance, resolve
from quantize.importances.weighting import ColumnWeights, Weighting
from quantize.roles import Role, tensor_role


def _order(name: str) -> tuple[str, str, float]:
    """Few bits come first, as names count them; of as many, IQ types from small to large, then the others."""
    family, bits = name[0], name.lstrip("IQ")[0]
    return bits, family, by_name(name).bits_per_weight if family == "I" else 0


CANDIDATES = tuple(sorted((name for name, codec in CODECS.items() if codec.is_candidate), key=_order))
"""Types that llama.cpp's recipes use, from few bits to many."""

_KEPT_EXPERTS = 24
"""Number of experts' matrices whose errors are kept. An expert has three, and threads that are ahead are with
the next ones; all other matrices are met again in every chunk."""

_ERROR_BYTES = 128 << 20
"""Memory for the errors of one tensor: fewer rows are encoded where they are long."""

_OF_EXPERTS = frozenset({Role.FFN_GATE, Role.FFN_UP, Role.FFN_DOWN})
"""Roles of stacks of experts; other stacks are of heads."""

Floats32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class BlockErrors:
    """The errors of some rows of a block of a tensor.

    rows    their numbers in the block, int64 (n_sampled,)
    errors  float32 (n_types, n_sampled, n_cols)
    n_rows  rows of the block
    """

    rows: torch.Tensor
    errors: torch.Tensor
    n_rows: int

    def sensitivity(self, gradient: torch.Tensor) -> npt.NDArray[np.float64]:
        """Return the sum over the block's rows of (e . d)^2 / 2, float64 (n_types,), as the sample tells it.

        gradient  d at the sampled rows, float32 (n_sampled, n_cols)
        """
        moved = torch.einsum("trc,rc->tr", self.errors, gradient)
        sums: npt.NDArray[np.float64] = to_numpy(moved.double().square_().mean(-1)) * (self.n_rows / 2)
        return sums


@dataclass(frozen=True)
class RowLengths:
    """Lengths of rows by tensor.

    real    without padding
    padded  with it, of the tensors that can be padded
    """

    real: Mapping[str, int] = field(default_factory=dict)
    padded: Mapping[str, int] = field(default_factory=dict)

    def n_real(self, name: str, n_cols: int) -> int:
        """Return how many of a tensor's `n_cols` columns are no padding."""
        return self.real.get(name, n_cols)

    def is_padded(self, name: str, n_cols: int) -> bool:
        """Return whether rows of a tensor that has `n_cols` columns can be padded, or are."""
        return name in self.padded or self.n_real(name, n_cols) < n_cols


class TypeErrors:
    """Errors of the tensors of one layer, made when they are asked for; several threads may ask.

    sources      by name: the tensors that would be encoded
    importances  of the layer's tensors
    types        candidates
    lengths      of rows: zeros are put behind those that can be padded
    n_rows       how many rows of a tensor are encoded, those of all its blocks together
    least_rows   how many rows of a block are encoded at least
    device       where errors are wanted
    """

    def __init__(
        self,
        sources: Mapping[str, SourceTensor],
        importances: Importances,
        types: Sequence[str],
        n_rows: int,
        least_rows: int,
        device: torch.device,
        lengths: RowLengths,
    ) -> None:
        self.lengths = lengths
        self.sources, self._importances, self._device = sources, importances, device
        self._types, self._n_rows, self._least_rows = types, n_rows, least_rows
        self._kept: dict[tuple[str, int], BlockErrors] = {}
        self._experts: OrderedDict[tuple[str, int], BlockErrors] = OrderedDict()
        self._resolved: dict[str, ResolvedImportance | None] = {}
        self._lock = Lock()

    def types_of(self, name: str, n_blocks: int) -> list[GGMLType]:
        """Return the candidates that a tensor can have."""
        n_cols = self.sources[name].shape[-1] + self.n_zeros(name)
        can_weigh = self._importance(name, n_blocks) is not None
        return candidates(self._types, n_cols, can_weigh=can_weigh)

    def n_zeros(self, name: str) -> int:
        """Return how many zeros are put behind the rows of a tensor."""
        n_cols = self.sources[name].shape[-1]
        return self.lengths.padded.get(name, n_cols) - n_cols

    def of(self, name: str, block: int, n_blocks: int) -> BlockErrors:
        """Return the errors of a block, one of `n_blocks` that a tensor's rows are."""
        is_expert = n_blocks > 1 and tensor_role(name, self.sources[name].shape).role in _OF_EXPERTS
        with self._lock:
            kept = self._experts if is_expert else self._kept
            if (name, block) not in kept:
                while is_expert and len(kept) >= _KEPT_EXPERTS:
                    self._experts.popitem(last=False)
                kept[name, block] = self._make(name, block, n_blocks)
            return kept[name, block]

    def _make(self, name: str, block: int, n_blocks: int) -> BlockErrors:
        source = self.sources[name]
        size = _info(source).n_rows // n_blocks
        n_bytes = 4 * len(self._types) * source.shape[-1] * n_blocks
        n_rows = min(self._n_rows // n_blocks, _ERROR_BYTES // n_bytes)
        rows = spread(size, max(n_rows, self._least_rows))
        importance = self._importance(name, n_blocks)
        weighting = None if importance is None else importance.weighting_of_row(block * size)
        weights = read_rows(source, block * size + rows)
        errors = errors_of(weights, self.types_of(name, n_blocks), weighting, self.n_zeros(name))
        device = self._device
        return BlockErrors(to_torch(rows, device), to_torch(errors, device), size)

    def _importance(self, name: str, n_blocks: int) -> ResolvedImportance | None:
        if name not in self._resolved:
            self._resolved[name] = resolve(_info(self.sources[name]), self._importances, n_blocks)
        return self._resolved[name]


def _info(source: SourceTensor) -> TensorInfo:
    return TensorInfo(source.name, source.shape, source.type)


def candidates(types: Sequence[str], n_cols: int, *, can_weigh: bool) -> list[GGMLType]:
    """Return those of the types that rows of `n_cols` columns can have.

    can_weigh  whether there are importances
    """
    known = [by_name(name) for name in types]
    return [
        type_
        for type_ in known
        if n_cols % type_.block_elems == 0 and (can_weigh or not requires_importances(type_.name))
    ]


def errors_of(
    weights: Floats32, types: Sequence[GGMLType], weighting: Weighting | None, n_zeros: int = 0
) -> Floats32:
    """Return the errors of rows at each type, float32 (n_types, n_rows, n_cols).

    n_zeros  so many are encoded behind each row; their errors are left out, because they multiply nothing
    """
    n_rows, n_cols = weights.shape
    errors = np.empty((len(types), n_rows, n_cols), np.float32)
    if n_zeros:
        weights = np.pad(weights, ((0, 0), (0, n_zeros)))
        weighting = None if weighting is None else ColumnWeights(np.pad(weighting.values, (0, n_zeros)))
    for error, type_ in zip(errors, types, strict=True):
        data = get_format(type_).encode(weights, weighting)
        decoded = get_decoder(type_)(data, weights.shape[1])
        np.subtract(weights[:, :n_cols], decoded[:, :n_cols], out=error)
    return errors


def read_rows(source: SourceTensor, rows: npt.NDArray[np.int64]) -> Floats32:
    """Return the rows with these ascending numbers, float32."""
    parts = [source.read_rows(int(row), int(row) + 1) for row in rows]
    whole: Floats32 = to_numpy(to_torch(np.concatenate(parts)).float())
    return whole


def spread(n: int, wanted: int) -> npt.NDArray[np.int64]:
    """Return `wanted` of the numbers below `n`, or all, as evenly spread as can be.

    >>> spread(10, 4).tolist()
    [1, 3, 6, 8]
    """
    count = min(n, wanted)
    return (2 * np.arange(count, dtype=np.int64) + 1) * n // (2 * count)
