"""Tables of whole numbers that are part of a model: the experts of each token, in DeepSeek V4.

X.tid2eid  I64 or I32 (vocab_size, experts per token)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from convert.weights.base import PlainWeight, WeightsLoader
from gguf_tools.errors import CheckpointError
from gguf_tools.format.ggml_types import I32, GGMLType

DTYPES = ("I32", "I64")


@dataclass(frozen=True, slots=True)
class Table(PlainWeight):
    """A table; `raw_rows` gives its numbers as I32, `read_rows` as float32."""

    @property
    def type(self) -> GGMLType:
        return I32

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.raw.read_rows(start, stop).astype(np.float32)

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop`, uint8 (n_bytes,); CheckpointError for a number beyond 32 bits."""
        stored = self.raw.read_rows(start, stop)
        numbers = stored.astype(np.int32)
        if not np.array_equal(numbers, stored):
            raise CheckpointError(
                f"{self.raw.path}: {self.name}: from row {start} on, a number has over 32 bits"
            )
        return np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)


LOADERS = (
    WeightsLoader(
        format="routing table", methods=("fp8", "mxfp4", "compressed-tensors"), main=".tid2eid", sides=(),
        load=lambda module: Table(module[".tid2eid"]),
        fits=lambda module: module[".tid2eid"].dtype in DTYPES, logical=".tid2eid",
    ),
)  # fmt: skip
