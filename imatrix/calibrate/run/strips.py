"""A strip: some rows of a tensor, and how they are encoded under what they multiply.

A strip is encoded twice, by the method and by the stock encoder. Rows that don't cost less by the method take
the stock encoder's bytes, and what comes of it is tried on held-out rows beside all of the stock encoder's.
Its bytes depend on nothing but the strip, so strips may be encoded in any order and anywhere: by threads
(`ThreadStrips`), or by the workers of a scheduler (cluster.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gguf_tools.format.tensors import TensorInfo
from imatrix.calibrate.statistics.conditions import Conditions
from imatrix.calibrate.statistics.gradient_factors import OutputBlock
from imatrix.calibrate.statistics.inputs import HeldPlaces
from imatrix.forward.device import to_numpy, to_torch
from imatrix.forward.workers import Workers
from quantize.fill.chunks import RowRange
from quantize.fill.encode import RowSources, encode_strip
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.codecs import requires_importances
from quantize.importances.weighting import ColumnWeights
from quantize.rounding.factor import Each
from quantize.rounding.judge import choose_cheaper
from quantize.rounding.methods import Matrix, Method


@dataclass(frozen=True)
class Strip:
    """Rows to be encoded together.

    start, stop  the rows, counted through the tensor's matrices
    conditions   of the rows
    block        the gradients at their outputs; None where only the inputs count
    """

    info: TensorInfo
    start: int
    stop: int
    conditions: Conditions
    block: OutputBlock | None

    def __str__(self) -> str:
        return str(self.rows)

    @property
    def rows(self) -> RowRange:
        return RowRange(self.info.name, self.start, self.stop)

    @property
    def n_weights(self) -> int:
        return (self.stop - self.start) * self.info.n_cols

    def matrix(self, rows: Floats32) -> Matrix:
        """Return the method's task, given the source's rows."""
        return Matrix(
            self.conditions.aim(rows, self.start), None if self.block is None else self.block.factor
        )

    def goes_with(self, other: Strip) -> bool:
        """Whether both can be encoded side by side."""
        return (
            self.block is not None
            and other.block is not None
            and self.info.type == other.info.type
            and self.conditions.factor is other.conditions.factor
        )


@dataclass(frozen=True, eq=False)
class HeldErrors:
    """Squared errors of products of some rows of a matrix.

    by_row    float64 (n_held,), of each held-out row; empty without any
    by_chunk  for a token of each chunk: in nats where the gradients are known
    """

    by_row: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    by_chunk: Mapping[int, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The sum over all held-out rows."""
        return float(self.by_row.sum())

    def is_close_to(self, other: HeldErrors) -> bool:
        """Whether the same rows can't tell which of two encodings is better.

        Their difference is less than two of its standard errors, were its mean zero. Rounding is chaotic:
        sums that come in another order give other bytes, as good as these, and the choice may be another.
        """
        moved = self.by_row - other.by_row
        return bool(abs(moved.sum()) < 2 * np.linalg.norm(moved))

    @classmethod
    def of(cls, errors: torch.Tensor, places: HeldPlaces, block: OutputBlock | None) -> HeldErrors:
        """Sum up errors of products, float32 (n_held, n_outputs).

        A block weighs errors of different outputs by the covariance of their gradients; without one all count
        alike. With one, those of a chunk are half of tr(G E H E^T) for a token: about the divergence that
        they cause, in nats.
        """
        weighed = errors if block is None else errors @ to_torch(block.covariance)
        by_row = (weighed.double() * errors).sum(1) * places.shares
        chunks, numbers = places.chunks.unique(return_inverse=True)
        in_nats = by_row * (1.0 if block is None else block.mean_square / 2)
        sums = torch.zeros(len(chunks), dtype=torch.float64).index_add(0, numbers, in_nats)
        return cls(to_numpy(by_row), dict(zip(chunks.tolist(), sums.tolist(), strict=True)))

    @classmethod
    def sum(cls, parts: Iterable[HeldErrors]) -> HeldErrors:
        """Add up those of all rows of a matrix."""
        parts, by_chunk = list(parts), dict[int, float]()
        for part in parts:
            for chunk, error in part.by_chunk.items():
                by_chunk[chunk] = by_chunk.get(chunk, 0.0) + error
        return cls(np.sum([part.by_row for part in parts], axis=0), by_chunk)


@dataclass(frozen=True)
class EncodedStrip:
    """A strip, encoded both ways.

    data    by the method, where that costs less; None where it can't encode
    stock   by the stock encoder
    errors  on held-out rows, of the method's bytes and of the stock encoder's
    """

    data: Bytes | None
    stock: Bytes
    errors: tuple[HeldErrors, HeldErrors] = (HeldErrors(), HeldErrors())


class StripExecutor(Protocol):
    """Encodes strips."""

    @property
    def n_at_once(self) -> int:
        """How many batches are encoded at the same time."""

    def each(self, batches: Iterable[Sequence[Strip]]) -> Iterator[list[EncodedStrip]]:
        """Yield the strips of every batch, encoded, in their order.

        batches  of strips that go with each other
        """


@dataclass(frozen=True)
class ThreadStrips:
    """Encodes strips in threads of this process."""

    method: Method
    sources: RowSources
    workers: Workers

    @property
    def n_at_once(self) -> int:
        return self.workers.n_threads

    def each(self, batches: Iterable[Sequence[Strip]]) -> Iterator[list[EncodedStrip]]:
        """See `StripExecutor`."""
        encode = partial(encode_strips, self.method, self.sources)
        batches = list(batches)
        if len(batches) < self.n_at_once:  # threads share each batch
            yield from (encode(strips, each=self.workers.each) for strips in batches)
        else:
            yield from self.workers.each(encode, batches)


def encode_strips(
    method: Method, sources: RowSources, strips: Sequence[Strip], *, each: Each = map
) -> list[EncodedStrip]:
    """Encode strips that go with each other; torch must have one thread in each task.

    each    does the parts of the work; the bytes do not depend on it
    raises  BadWeights for a NaN or an infinity in the source, BlockRefused for what the type can't hold
    """
    info, factor = strips[0].info, strips[0].conditions.factor
    read = [sources.tensors[strip.info.name].read_rows(strip.start, strip.stop) for strip in strips]

    def stock() -> list[Bytes]:
        return [_stock(strip, sources, own) for strip, own in zip(strips, read, strict=True)]

    if factor is None or not method.can_encode(info.type):
        return [EncodedStrip(None, bytes_) for bytes_ in stock()]
    rows = [own.astype(np.float32) for own in read]
    matrices: list[Matrix] = []

    def encode(which: int) -> list[Bytes]:
        if which:
            return stock()
        matrices.extend(strip.matrix(own) for strip, own in zip(strips, rows, strict=True))
        return method.encode(matrices, info.type, factor)

    encoded, stocks = each(encode, range(2))
    better = [
        choose_cheaper(matrix.rows, data, theirs, info.type, factor, matrix.outputs, each)
        for matrix, data, theirs in zip(matrices, encoded, stocks, strict=True)
    ]
    return [
        EncodedStrip(data, theirs, _held_out_errors(strip, own, (data, theirs), each))
        for strip, own, data, theirs in zip(strips, rows, better, stocks, strict=True)
    ]


def _stock(strip: Strip, sources: RowSources, rows: Rows) -> Bytes:
    """Return the stock encoder's bytes, under the importances that are given or were observed."""
    info, observed = strip.info, strip.conditions.importances
    if observed is None and requires_importances(info.type.name):
        observed = np.ones(info.n_cols, np.float32)
    weighting = sources.weighting_of(strip.rows)
    if weighting is None and observed is not None:
        weighting = ColumnWeights(observed)
    return encode_strip(rows, strip.start, info.name, info.type, weighting)


def _held_out_errors(
    strip: Strip, rows: Floats32, encoded: tuple[Bytes, Bytes], each: Each
) -> tuple[HeldErrors, HeldErrors]:
    """Return the squared errors of two encodings on the held-out rows.

    rows  of the source, float32 (n_rows, n_cols)
    """
    held, info = strip.conditions.held, strip.info
    if held is None:
        return HeldErrors(), HeldErrors()
    decode = get_format(info.type).decode
    weights, moved = to_torch(rows), None
    if held.originals is not held.x:
        (moved,) = each(lambda _: (held.originals - held.x) @ weights.T, range(1))

    def errors_of(which: int) -> HeldErrors:
        errors = held.x @ (weights - to_torch(decode(encoded[which], info.n_cols))).T
        if moved is not None:
            errors += moved
        return HeldErrors.of(errors, held.places, strip.block)

    ours, theirs = each(errors_of, range(2))
    return ours, theirs
