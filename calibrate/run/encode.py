"""Encodes rows under what they multiply, and keeps the method's bytes where they prove better than stock's.

Rows that share statistics are a group: a matrix, one head's rows, one expert's. A group is encoded twice, by
the method and by the stock encoder, and both are tried on held-out rows. A group that the method does not
improve keeps the stock encoder's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibrate.methods import Matrix, Method
from calibrate.run.held_errors import HeldErrors
from calibrate.run.output import ChunkErrors, Record, Writer
from calibrate.statistics.conditions import Conditions
from calibrate.statistics.gradient_factors import GradientFactors, OutputBlock
from forward.device import to_torch
from forward.workers import Workers
from gguf_tools.format.tensors import TensorInfo
from quantize.fill.chunks import RowRange
from quantize.fill.encode import RowSources, encode_strip
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.codecs import requires_importances
from quantize.importances.weighting import ColumnWeights

_STRIP_ROWS = 256
"""Rows of a task: enough for full vectors of rows, few enough for many threads."""

MOST_TOGETHER, WEIGHTS_TOGETHER = 4, 8 << 20
"""Blocks of rows that a task encodes side by side, and their weights. Four take 2.5 times as long as one, and
there is little more to gain."""


@dataclass(frozen=True)
class RowGroup:
    """Rows of a tensor that share statistics.

    first   row of the tensor, counted through its matrices
    blocks  the gradients at the rows' outputs, in runs of rows; empty where only the inputs count
    """

    info: TensorInfo
    first: int
    n_rows: int
    conditions: Conditions
    blocks: Sequence[OutputBlock] = ()

    @property
    def strips(self) -> Iterator[_Strip]:
        """Yield the rows of each task."""
        for block in self.blocks:
            yield _Strip(self, self.first + block.start, self.first + block.stop, block)
        last = self.first + self.n_rows
        for start in range(self.first, last, _STRIP_ROWS) if not self.blocks else ():
            yield _Strip(self, start, min(start + _STRIP_ROWS, last), None)


@dataclass(frozen=True)
class _Strip:
    """Some rows of a group.

    start, stop  the rows, counted through the tensor's matrices
    block        the gradients at their outputs; None where only the inputs count
    """

    group: RowGroup
    start: int
    stop: int
    block: OutputBlock | None

    @property
    def n_weights(self) -> int:
        return (self.stop - self.start) * self.group.info.n_cols

    def matrix(self, rows: Floats32) -> Matrix:
        """Return the method's task, given the source's rows."""
        return Matrix(self.group.conditions.aim(rows), None if self.block is None else self.block.factor)

    def goes_with(self, other: _Strip) -> bool:
        """Whether both can be encoded side by side."""
        return (
            self.block is not None
            and other.block is not None
            and self.group.info.type == other.group.info.type
            and self.group.conditions.factor is other.group.conditions.factor
        )


@dataclass(frozen=True)
class _Encoded:
    """A strip, encoded both ways.

    data    by the method; None where it can't
    stock   by the stock encoder
    errors  on held-out rows, of the method's bytes and of the stock encoder's
    """

    data: Bytes | None
    stock: Bytes
    errors: tuple[HeldErrors, HeldErrors] = (HeldErrors(), HeldErrors())


class Encoder:
    """Encodes the groups of a run.

    gradients  the factors at the outputs of the matrices
    """

    def __init__(
        self,
        method: Method,
        sources: RowSources,
        gradients: GradientFactors,
        workers: Workers,
        writer: Writer,
    ) -> None:
        self._method, self._sources, self._gradients = method, sources, gradients
        self.workers, self.writer = workers, writer

    def make(self, groups: Sequence[RowGroup]) -> None:
        """Encode groups and write them; those of one tensor that stand side by side follow each other."""
        for name in {group.info.name for group in groups}:
            self._gradients.open(name)
        groups = list(self.workers.each(self._with_blocks, groups))
        strips = [strip for group in groups for strip in group.strips]
        n_together = max(1, min(MOST_TOGETHER, len(strips) // self.workers.n_threads))
        batches = self.workers.each(self._encode, _batches(strips, n_together))
        encoded = (each for batch in batches for each in batch)
        for run in _runs(groups):
            data = [self._choose(group, [next(encoded) for _ in group.strips]) for group in run]
            self.writer.write(run[0].info.name, run[0].first, np.concatenate(data))

    def _with_blocks(self, group: RowGroup) -> RowGroup:
        return replace(group, blocks=self._gradients.blocks(group.info, group.first, group.n_rows))

    def _encode(self, strips: Sequence[_Strip]) -> list[_Encoded]:
        """Encode strips that go with each other."""
        info, factor = strips[0].group.info, strips[0].group.conditions.factor
        sources = [
            self._sources.tensors[each.group.info.name].read_rows(each.start, each.stop) for each in strips
        ]
        stocks = [self._stock(each, source) for each, source in zip(strips, sources, strict=True)]
        if factor is None or not self._method.can_encode(info.type):
            return [_Encoded(None, stock) for stock in stocks]
        rows = [source.astype(np.float32) for source in sources]
        del sources
        matrices = [strip.matrix(own) for strip, own in zip(strips, rows, strict=True)]
        encoded = self._method.encode(matrices, info.type, factor)
        return [
            _Encoded(data, stock, _held_out_errors(strip, own, data, stock))
            for strip, own, data, stock in zip(strips, rows, encoded, stocks, strict=True)
        ]

    def _stock(self, strip: _Strip, rows: Rows) -> Bytes:
        """Return the stock encoder's bytes, under the importances that are given or were observed."""
        info, statistics = strip.group.info, strip.group.conditions.statistics
        weighting = self._sources.weighting_of(RowRange(info.name, strip.start, strip.stop))
        if weighting is None and (statistics.n_rows or requires_importances(info.type.name)):
            weighting = ColumnWeights(statistics.importances())
        return encode_strip(rows, strip.start, info.name, info.type, weighting)

    def _choose(self, group: RowGroup, strips: Sequence[_Encoded]) -> Bytes:
        """Return the better bytes of a group, and keep a record of the choice.

        The method's bytes must have the smaller error on held-out rows; where there are none, they are kept.
        """
        error, stock_error = (HeldErrors.sum(strip.errors[which] for strip in strips) for which in (0, 1))
        by_method = [strip.data for strip in strips if strip.data is not None]
        is_proven = group.conditions.held is None or error.total < stock_error.total
        is_better = len(by_method) == len(strips) and is_proven
        self.writer.records.add(
            Record(
                tensor=group.info.name,
                first=group.first,
                n_rows=group.n_rows,
                n_cols=group.info.n_cols,
                n_seen=group.conditions.statistics.n_seen,
                has_factor=group.conditions.factor is not None,
                error=error.total,
                stock_error=stock_error.total,
                is_stock=not is_better,
                chunks=tuple(
                    ChunkErrors(chunk, error.by_chunk[chunk], each)
                    for chunk, each in sorted(stock_error.by_chunk.items())
                ),
                in_nats=bool(group.blocks),
            )
        )
        return np.concatenate(by_method if is_better else [strip.stock for strip in strips])


def _batches(strips: Iterable[_Strip], most: int) -> Iterator[list[_Strip]]:
    """Yield strips, those together that can be encoded side by side, up to `most` of them."""
    batch: list[_Strip] = []
    for strip in strips:
        n_weights = sum(each.n_weights for each in (*batch, strip))
        fits = len(batch) < most and n_weights <= WEIGHTS_TOGETHER
        if batch and not (fits and strip.goes_with(batch[0])):
            yield batch
            batch = []
        batch.append(strip)
    if batch:
        yield batch


def _runs(groups: Iterable[RowGroup]) -> Iterator[list[RowGroup]]:
    """Yield groups, those together that stand side by side in their tensor."""
    run: list[RowGroup] = []
    for group in groups:
        if run and (group.info.name, group.first) != (run[-1].info.name, run[-1].first + run[-1].n_rows):
            yield run
            run = []
        run.append(group)
    if run:
        yield run


def _held_out_errors(
    strip: _Strip, rows: Floats32, data: Bytes, stock: Bytes
) -> tuple[HeldErrors, HeldErrors]:
    """Return the squared errors of two encodings on the held-out rows.

    rows  of the source, float32 (n_rows, n_cols)
    """
    held, info = strip.group.conditions.held, strip.group.info
    if held is None:
        return HeldErrors(), HeldErrors()
    decode = get_format(info.type).decode
    weights = to_torch(rows)
    moved = None if held.originals is held.x else (held.originals - held.x) @ weights.T
    found = []
    for encoded in (data, stock):
        errors = held.x @ (weights - to_torch(decode(encoded, info.n_cols))).T
        if moved is not None:
            errors += moved
        found.append(HeldErrors.of(errors, held.places, strip.block))
    return found[0], found[1]
