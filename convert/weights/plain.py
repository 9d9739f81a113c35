"""Weights stored as floats (F32, F16, BF16), which are read in the dtype they are stored in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from gguf_tools.format.ggml_types import BF16, F16, F32, GGMLType

TYPES: Mapping[str, GGMLType] = MappingProxyType({"F32": F32, "F16": F16, "BF16": BF16})
"""safetensors dtype -> the ggml type with the same bytes."""


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A stored tensor that is the weight itself."""

    raw: RawTensor
    by_rows: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return self.raw.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.raw.shape

    @property
    def type(self) -> GGMLType:
        return TYPES[self.raw.dtype]

    @property
    def stored_as(self) -> str:
        return self.raw.dtype

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.raw.read_rows(start, stop)
