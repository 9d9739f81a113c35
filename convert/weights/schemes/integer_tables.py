"""Whole numbers that are part of a model: experts of each token in DeepSeek V4, hashes in Qwen4Exp.

X.tid2eid                  I64 or I32 (vocab_size, experts per token)
X.layer_multipliers        I64 (tokens of the longest n-gram,): what makes a number of an n-gram
X.ngram_heads_vocab_sizes  I64 (heads,): rows of each head in the table of n-grams
X.ngram_heads_offsets      I64 (heads,): the first of them
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from convert.weights.base import PlainWeight, WeightsLoader
from gguf_tools.errors import CheckpointError
from gguf_tools.format.ggml_types import I32, GGMLType

DTYPES = ("I32", "I64")
METHODS = ("fp8", "mxfp4", "compressed-tensors")
"""Ways to quantize the other weights of such models."""


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


def _hash_numbers(name: str) -> WeightsLoader:
    """Return the loader of numbers that a family reads as they are stored: `Renaming.numbers`."""
    return WeightsLoader(
        format="hash numbers", methods=METHODS, main=name, sides=(), load=lambda module: Table(module[name]),
        fits=lambda module: module[name].dtype == "I64", logical=name, decodes=False,
    )  # fmt: skip


LOADERS = (
    WeightsLoader(
        format="routing table", methods=METHODS, main=".tid2eid", sides=(),
        load=lambda module: Table(module[".tid2eid"]),
        fits=lambda module: module[".tid2eid"].dtype in DTYPES, logical=".tid2eid", decodes=False,
    ),
    *map(_hash_numbers, (".layer_multipliers", ".ngram_heads_vocab_sizes", ".ngram_heads_offsets")),
)  # fmt: skip
