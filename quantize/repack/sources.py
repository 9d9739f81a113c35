"""Tensors of a file with their rows regrouped while they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.shards import GGUFSet, open_gguf
from quantize.fill.sources import FLOAT_DTYPES, GGUFTensor, SourceTensor
from quantize.formats import get_decoder


@dataclass(frozen=True)
class Regrouped:
    """A stored tensor whose rows are interleaved or taken apart; `type` is what they become."""

    stored: GGUFTensor
    type: GGMLType
    by_rows: bool = True

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def raw_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        from quantize.formats.ik.interleaved.interleaved import from_base, to_base

        apart = self.type.rows_interleaved == 1
        grouped = self.stored.type if apart else self.type
        group, n_cols = grouped.rows_interleaved, self.shape[-1]
        first, last = start // group * group, -(-stop // group) * group
        data = self.stored.raw_rows(first, last).reshape(last - first, -1)
        rows = to_base(grouped, data, n_cols) if apart else from_base(grouped, data, n_cols)
        return rows[start - first : stop - first].reshape(-1)

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        raw, dtype = self.raw_rows(start, stop), FLOAT_DTYPES.get(self.type)
        if dtype is not None:
            return raw.view(dtype).reshape(stop - start, -1)
        return get_decoder(self.type)(raw.reshape(stop - start, -1), self.shape[-1])


@dataclass(frozen=True)
class RegroupedSources:
    """The tensors of a GGUF file or a split set, some of them regrouped.

    path   of the file, or of any part
    types  name -> the type that its rows become
    """

    path: Path
    types: Mapping[str, GGMLType]

    @contextmanager
    def open(self) -> Iterator[Mapping[str, SourceTensor]]:
        with open_gguf(self.path) as source:
            yield self.of(source)

    def of(self, source: GGUFSet) -> dict[str, SourceTensor]:
        """Return the same for a file that is open."""
        return {name: self._tensor(GGUFTensor(source, name)) for name in source.tensors}

    def _tensor(self, stored: GGUFTensor) -> SourceTensor:
        type_ = self.types.get(stored.name, stored.type)
        return stored if type_ == stored.type else Regrouped(stored, type_)
