"""How a checkpoint format is described: the weights it makes of stored tensors, read by row ranges.

A checkpoint stores tensors; a model has weights. For a plain checkpoint they are the same; a quantized one
stores a weight as several tensors (codes, scales, zero points ...) under names of its own. A loader
bridges the two, for one format:

    X.qweight, X.qzeros, X.scales, X.g_idx  --loader-->  X.weight: a Weight that decodes rows of itself

A `WeightsLoader` says by which stored tensor a module of the format is known (`main`), which other tensors
belong to it (`sides`), whether a module that looks so really is (`fits`), and what Weight it is
(`load`). It sees one module at a time and reads no weights. Loaders don't know of each other.

A new format is a module with a Weight of its own, `LOADERS`, and one line in the registry of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import ClassVar, Protocol

import numpy as np

from convert.checkpoint.checkpoint import Checkpoint
from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.settings import Settings
from gguf_tools.errors import CheckpointError, MissingTensor
from gguf_tools.format.ggml_types import BF16, F16, F32, GGMLType
from quantize.fill.sources import RowSource


class Weight(RowSource, Protocol):
    """One logical weight, unread.

    name       as in an unquantized checkpoint
    type       F32, F16 or BF16: what read_rows gives, F32 for anything that is decoded; or the quantized type
               whose blocks the weight can be had as without loss
    stored_as  how the checkpoint holds it, for people: "BF16", "F8_E4M3 in blocks of 128x128"

    A row of the weight may lie in a column of what is stored; then `by_rows` is False. `read_rows` reads and
    decodes what these rows need; a format that needs more says so where it defines its Weight. It raises
    CheckpointError when the file can't give what it promised.

    A weight stored as codes and scales that a quantized type has as well is a SourceTensor: `raw_rows` gives
    blocks with the same weights. It raises CheckpointError for what the type can't hold.
    """

    @property
    def stored_as(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Decoded:
    """Base of weights that are decoded, and so are read as float32.

    A class whose rows lie in columns of what is stored sets by_rows to False.
    """

    type: ClassVar[GGMLType] = F32
    by_rows: ClassVar[bool] = True

    name: str
    shape: tuple[int, ...]


class Weights(Protocol):
    """The logical weights of a checkpoint: what rules pick from."""

    @property
    def checkpoint(self) -> Checkpoint: ...

    def names(self) -> tuple[str, ...]:
        """Return the logical names, each where its main stored tensor stands in the checkpoint."""

    @property
    def last(self) -> Collection[str]:
        """Those of the names that llama.cpp's converter comes to when it is through with all others."""

    @property
    def dropped(self) -> Mapping[str, str]:
        """Stored tensors that are part of no weight and not needed -> why."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user on how the weights are stored."""

    def weight(self, name: str) -> Weight:
        """Return the weight with the logical `name`, unread.

        raises  MissingTensor when `name`, or a stored tensor that it is made of, is not there,
                CheckpointError when stored tensors don't fit each other,
                UnsupportedCheckpoint when this weight is stored in a way that its loader can't read
        """


@dataclass(frozen=True, slots=True)
class Module:
    """A place in the model that has a weight, with the tensors that are stored for it.

    stem        what the names of those tensors begin with: "model.layers.0.self_attn.o_proj"
    name        the logical name of the weight
    checkpoint  where the tensors are
    settings    the checkpoint's quantization settings
    """

    stem: str
    name: str
    checkpoint: Checkpoint
    settings: Settings

    def get(self, suffix: str) -> RawTensor | None:
        """Return the stored tensor `stem` + `suffix`, None when there is none."""
        name = self.stem + suffix
        return self.checkpoint.raw(name) if name in self.checkpoint else None

    def has(self, *suffixes: str) -> bool:
        return all(self.stem + suffix in self.checkpoint for suffix in suffixes)

    def __getitem__(self, suffix: str) -> RawTensor:
        """Return the stored tensor `stem` + `suffix`; MissingTensor when there is none."""
        raw = self.get(suffix)
        if raw is None:
            raise MissingTensor(
                f"{self.checkpoint.folder}: {self.name}: quantized, but {self.stem}{suffix} is missing"
                " (a shard may be missing)"
            )
        return raw

    def wrong(self, raw: RawTensor, found: str, expected: str) -> CheckpointError:
        """Return the error for a stored tensor of this module that doesn't fit the others."""
        return CheckpointError(f"{raw.path}: {raw.name}: {found}, expected {expected}")


@dataclass(frozen=True)
class WeightsLoader:
    """One way in which a checkpoint format stores a weight.

    format   for messages: "GPTQ"
    methods  values of quant_method that can mean it; with one of them in the configuration only its loaders
             are tried, with none all of them are
    main     suffix of the stored tensor that shows such a module; the weight stands in its place
    sides    suffixes of the tensors that belong to the module when they are there
    load     module -> Weight
    fits     whether a module with `main` is stored in this way, by names, dtypes and shapes; reads no data.
             Any is, unless it is said
    logical  suffix of the weight's name
    last     whether llama.cpp's converter comes to these weights after all others. It gives a weight that it
             makes of packed integers a new name, behind those of the checkpoint
    decodes  whether the weights stand for floats that were quantized
    """

    format: str
    methods: tuple[str, ...]
    main: str
    sides: tuple[str, ...]
    load: Callable[[Module], Weight]
    fits: Callable[[Module], bool] = lambda module: True
    logical: str = ".weight"
    last: bool = False
    decodes: bool = True


def rows_and_cols(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many rows `shape` has, over all its matrices, and how long they are."""
    return prod(shape[:-1]), (shape[-1] if shape else 1)


TYPES: Mapping[str, GGMLType] = MappingProxyType({"F32": F32, "F16": F16, "BF16": BF16, "F64": F32})
"""safetensors dtype of plain weights -> the ggml type that they are read as: the one with the same bytes, and
F32 for F64."""


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A stored tensor that is the weight itself; 64-bit floats are rounded to 32 bits."""

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
        rows = self.raw.read_rows(start, stop)
        return rows.astype(np.float32) if self.raw.dtype == "F64" else rows
