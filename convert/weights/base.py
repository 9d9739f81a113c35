"""What a checkpoint format offers: logical weights, read by row ranges.

A checkpoint stores tensors; a model has weights. For a plain checkpoint they are the same; a quantized one
stores a weight as several tensors (codes, scales, zero points ...) under names of its own. A loader
bridges the two, for one format:

    stored tensors of a Checkpoint --loader--> names(): "X.weight", "X.bias", ... as an unquantized
                                               checkpoint of the model would have them
                                               weight(name): a Weight that decodes rows of itself

How formats live together. `choose_loader` picks one loader per checkpoint, once, from the configuration and
the stored tensors. A model can mix: a module that the format left alone (listed as not converted, or
simply stored plain) is served by the plain loader, which every loader holds for that purpose. Whether a
module is quantized is decided by the tensors it has, not by the lists in the configuration, which every
producer writes in another way. Loaders don't inherit from each other, and nothing outside a loader's
module tests for a format.

A new format is a module with a `Weight` of its own, a loader class, and one line in the registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Protocol

import numpy as np

from convert.checkpoint import Checkpoint
from gguf_tools.errors import BadConfig
from gguf_tools.ggml_types import GGMLType


class Weight(Protocol):
    """One logical weight, unread.

    name       as in an unquantized checkpoint
    shape      rows first; a row is the last axis, rows are counted over all the axes before it
    type       F32, F16 or BF16: what read_rows gives. F32 for anything that is decoded
    stored_as  how the checkpoint holds it, for people: "BF16", "F8_E4M3 in blocks of 128x128"
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> GGMLType: ...
    @property
    def stored_as(self) -> str: ...

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop`, (stop - start, n_cols), as float32, float16 or bfloat16 by `type`.

        Safe to call from several threads. Reads and decodes what these rows need; a format that needs more
        says so where it defines its Weight.
        raises  CheckpointError when the file can't give what it promised
        """
        ...


class WeightsLoader(Protocol):
    """One checkpoint format over one open checkpoint."""

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        """Return whether `checkpoint` is in this format, by its configuration and headers."""
        ...

    def __init__(self, checkpoint: Checkpoint) -> None: ...

    @property
    def checkpoint(self) -> Checkpoint: ...

    def names(self) -> tuple[str, ...]:
        """Return the logical names, each where its main stored tensor stands in the checkpoint."""
        ...

    @property
    def dropped(self) -> Mapping[str, str]:
        """Stored tensors that are part of no weight and not needed -> why."""
        ...

    def weight(self, name: str) -> Weight:
        """Return the weight with the logical `name`, unread.

        raises  MissingTensor when `name`, or a stored tensor that it is made of, is not there,
                CheckpointError when stored tensors don't fit each other,
                UnsupportedCheckpoint when this weight is stored in a way that the loader can't read
        """
        ...


def quantization_config(checkpoint: Checkpoint) -> dict:
    """Return quantization_config from config.json, empty when there is none."""
    value = checkpoint.config.get("quantization_config")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadConfig(
            f"{checkpoint.config_path}: quantization_config is {str(value)[:80]!r}, expected an object"
        )
    return value


def rows_and_cols(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many rows `shape` has, over all its matrices, and how long they are."""
    return prod(shape[:-1]), (shape[-1] if shape else 1)
