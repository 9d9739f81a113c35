"""Weights with an adapter merged into them, row by row, while they are read.

PEFT stores two factors for a module, and sometimes more. What `merge_and_unload` makes of them:

    lora_A (rank, inputs), lora_B (outputs, rank)         W + s B A         of (outputs, inputs)
    lora_embedding_A (rank, tokens), ..._B (size, rank)   W + s (B A)^T     of embeddings, (tokens, size)
    lora_A (n rank, inputs), lora_B (outputs, rank n)     the same for each of a stack of n matrices; columns
                                                          of B belong to them by turns
    lora_magnitude_vector (outputs,)                      DoRA: each output is scaled to this length
    lora_B.bias (outputs,)                                s times this is added to the bias
    token_adapter.trainable_tokens_delta                  these rows of the embeddings, in place of others
    NAME.weight, NAME.bias                                the weight itself, in place of the base's

s is alpha / rank, or alpha / sqrt(rank), times the scale that the user gives. Products are summed in float32,
the first of a rank first, and then added to the decoded weight, so the numbers don't depend on which rows are
read together. Factors are read when their weight is, and a few stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from convert.checkpoint.adapter import Adapter
from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Weight
from gguf_tools.format.ggml_types import F32, GGMLType
from quantize.fill.sources import split_rows

_STRIP = 1 << 20
"""Elements that are read at once for the lengths of columns."""


@dataclass(frozen=True)
class Factors:
    """Two factors, whose product is added to a matrix, or to each matrix of a stack.

    a, b       as stored, see the module
    n_mats     matrices of the stack
    scale      of the product
    is_turned  whether rows of the matrix are inputs
    """

    adapter: Adapter
    a: RawTensor
    b: RawTensor
    n_mats: int
    scale: float
    is_turned: bool

    @property
    def rank(self) -> int:
        return self.a.n_rows // self.n_mats

    def sides(self, matrix: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the two sides of rows `start` to `stop` of a matrix's product, float32.

        returns  (stop - start, rank), (rank, n_cols)
        """
        a = self.adapter.array(self.a).reshape(self.n_mats, -1, self.a.n_cols)[matrix]
        b = self.adapter.array(self.b).reshape(self.b.n_rows, -1, self.n_mats)[..., matrix]
        left, right = (a[:, start:stop].T, b.T) if self.is_turned else (b[start:stop], a)
        return np.ascontiguousarray(left), np.ascontiguousarray(right)

    def added(self, matrix: int, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop` of a matrix's scaled product, float32 (stop - start, n_cols)."""
        # numba is loaded by the first weight that is decoded, not by looking at a checkpoint.
        from convert.weights.kernels import add_products

        left, right = self.sides(matrix, start, stop)
        rows = np.zeros((len(left), right.shape[1]), np.float32)
        add_products(left, right, rows)
        rows *= np.float32(self.scale)
        return rows


@dataclass(frozen=True)
class Changed:
    """Base of weights that an adapter changes, read as float32.

    weight  of the base, in its place
    """

    weight: Weight

    type: ClassVar[GGMLType] = F32

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def stored_as(self) -> str:
        return self.weight.stored_as

    @property
    def by_rows(self) -> bool:
        return self.weight.by_rows

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Return rows of the base, for a class to change."""
        return np.array(self.weight.read_rows(start, stop), np.float32)


@dataclass(frozen=True)
class Merged(Changed):
    """A weight to which a product is added.

    factors    of the matrix, or of the stack that the weight is a part of
    matrix     which matrix of that stack the weight begins with
    first      the row of that matrix with which it begins
    magnitude  length that each output gets, None for as it is
    """

    factors: Factors
    matrix: int = 0
    first: int = 0
    magnitude: RawTensor | None = None

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        rows = self._sums(start, stop)
        if self.magnitude is None:
            return rows
        lengths = self.factors.adapter.array(self.magnitude).reshape(-1)
        if self.factors.is_turned:
            rows *= lengths / self._lengths_of_columns
        else:
            rows *= (lengths[start:stop] / _root(_squares(rows).sum(axis=1)))[:, None]
        return rows

    def _sums(self, start: int, stop: int) -> np.ndarray:
        rows = Changed.read_rows(self, start, stop)
        for here, *place in self.places(start, stop):
            rows[here] += self.factors.added(*place)
        return rows

    def places(self, start: int, stop: int) -> Iterator[tuple[slice, int, int, int]]:
        """Yield which of the rows from `start` to `stop` are which rows of the factors' matrices."""
        done = 0
        for index, low, high in split_rows(start, stop, self.shape[-2]):
            here = slice(done, done + high - low)
            yield here, self.matrix + index, self.first + low, self.first + high
            done = here.stop

    @cached_property
    def _lengths_of_columns(self) -> np.ndarray:
        n_rows, n_cols = self.shape
        step, squares = max(1, _STRIP // n_cols), np.zeros(n_cols)
        for start in range(0, n_rows, step):
            squares += _squares(self._sums(start, min(start + step, n_rows))).sum(axis=0)
        return _root(squares)


def _squares(rows: np.ndarray) -> np.ndarray:
    return np.square(rows, dtype=np.float64)


def _root(sums: np.ndarray) -> np.ndarray:
    return np.sqrt(sums).astype(np.float32)


@dataclass(frozen=True)
class WithRows(Changed):
    """Embeddings of which some rows are others.

    numbers  of these rows
    rows     as the adapter stores them
    """

    numbers: tuple[int, ...]
    rows: RawTensor

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        rows = super().read_rows(start, stop)
        for place, number in enumerate(self.numbers):
            if start <= number < stop:
                rows[number - start] = self.rows.read_rows(place, place + 1)[0]
        return rows


@dataclass(frozen=True)
class Shifted(Changed):
    """A bias to which another one is added, times a scale."""

    bias: RawTensor
    scale: float

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        bias = self.bias.read_rows(start, stop).astype(np.float32)
        return super().read_rows(start, stop) + bias * np.float32(self.scale)
