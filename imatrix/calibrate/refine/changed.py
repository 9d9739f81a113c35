"""Stored tensors whose bytes change while a file is refined."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy.typing as npt

from gguf_tools.format.ggml_types import GGMLType
from quantize.fill.sources import MadeOfTensor
from quantize.formats import get_decoder
from quantize.formats.base import Bytes


class ChangedTensor(MadeOfTensor, ABC):
    """A stored tensor with other bytes of the same type, as a SourceTensor."""

    @property
    def type(self) -> GGMLType:
        return self.tensor.type

    @abstractmethod
    def stored_rows(self, start: int, stop: int) -> Bytes:
        """Read rows as they are stored now, uint8 (n_rows, row bytes)."""

    def raw_rows(self, start: int, stop: int) -> Bytes:
        return self.stored_rows(start, stop).reshape(-1)

    def read_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        return get_decoder(self.type)(self.stored_rows(start, stop), self.shape[-1])
