"""Making tensors: rows are encoded under what they multiply, compared with stock's, and written.

Rows that share statistics are a group: a matrix, one head's rows, one expert's. A group is encoded twice, by
feedback and as the stock encoder does it, and both are tried on rows that were held back. A group that
feedback does not improve keeps stock's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
import xxhash

from calibrate.rounding.base import Effort
from calibrate.rounding.factor import Factor
from calibrate.rounding.feedback import encode_compensated
from calibrate.rounding.rounders import can_compensate
from calibrate.rounding.two_sided import encode_side_by_side
from calibrate.run.partial_model import PartialTensor
from calibrate.run.records import Record, Records
from calibrate.statistics.drift_correction import corrected, correction
from calibrate.statistics.gradient_factors import GradientFactors, OutputBlock
from calibrate.statistics.inputs import Held
from calibrate.statistics.moments import Statistics
from calibrate.statistics.shrinkage import Trust
from forward.workers import Workers
from gguf_tools.errors import BadActivation, BadMoments, QuantError
from gguf_tools.files.partial_file import PartialFile
from gguf_tools.format.tensors import TensorInfo
from quantize.fill.chunks import ChunkTask, RowRange
from quantize.fill.encode import FillJob, digest_rows, encode_strip, in_byte_order
from quantize.fill.executors import Done, naming
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.codecs import requires_importances
from quantize.importances.weighting import ColumnWeights

_STRIP_ROWS = 256
"""Rows of a task: enough for full vectors of rows, few enough for many threads."""

MOST_TOGETHER, WEIGHTS_TOGETHER = 4, 8 << 20
"""Blocks of rows that a task encodes side by side, and their weights. Four take 2.5 times as long as one, and
there is little more to gain."""

WEIGHT_BYTES = 24
"""Memory of a weight while it is encoded, at most."""


@dataclass(frozen=True)
class Conditions:
    """What rows are encoded under.

    statistics  of what they multiply
    factor      of its second moments; None where these can't be used
    correction      what is added to W is W times this, float32 (n_cols, n_cols); None: nothing
    held        rows on which encodings are compared; None: there are none
    """

    statistics: Statistics
    factor: Factor | None
    correction: Floats32 | None
    held: Held | None

    @classmethod
    def nothing(cls, n_cols: int) -> Self:
        """Return what rows are encoded under that multiply nothing that anyone sees."""
        return cls(Statistics.nothing(n_cols), None, None, None)


def conditions_of(
    inputs: Iterable[tuple[Statistics, Held | None]], name: str, workers: Workers, trust: Trust
) -> Iterator[Conditions]:
    """Yield what follows from statistics, each with the rows that were held back.

    name    of a matrix, for messages
    raises  BadActivation for NaN or infinity in what it multiplies
    """

    def factor_of(each: tuple[Statistics, Held | None]) -> tuple[Statistics, Held | None, Factor | None]:
        statistics, held = each
        if not statistics.is_finite:
            raise BadActivation(f"{name}: its input has NaN or infinity")
        if not statistics.n_rows:
            return statistics, held, None
        try:
            return statistics, held, Factor.of(statistics.own, trust.input_damp)
        except BadMoments:
            return statistics, held, None

    for statistics, held, factor in workers.each(factor_of, inputs):
        change = None if factor is None else correction(statistics, factor, workers)
        yield Conditions(statistics, factor, change, held)


@dataclass(frozen=True)
class RowGroup:
    """Rows of a tensor that share statistics.

    first   row of the tensor, counted through its matrices
    blocks  the other side of the rows, in runs of them; empty where only what they multiply counts
    """

    info: TensorInfo
    first: int
    n_rows: int
    conditions: Conditions
    blocks: Sequence[OutputBlock] = ()

    @property
    def strips(self) -> Iterator[tuple[int, int, OutputBlock | None]]:
        """Yield the rows of each task, with their block."""
        for block in self.blocks:
            yield self.first + block.start, self.first + block.stop, block
        for start in range(self.first, self.first + self.n_rows, _STRIP_ROWS) if not self.blocks else ():
            yield start, min(start + _STRIP_ROWS, self.first + self.n_rows), None


@dataclass(frozen=True)
class _Unit:
    """Some rows of a group.

    start, stop  the rows, counted through the tensor's matrices
    block        their other side; None where only what they multiply counts
    """

    group: RowGroup
    start: int
    stop: int
    block: OutputBlock | None

    @property
    def n_weights(self) -> int:
        return (self.stop - self.start) * self.group.info.n_cols

    def wanted(self, rows: Floats32) -> Floats32:
        """Return what rounding aims at, given the rows."""
        conditions = self.group.conditions
        if conditions.correction is None:
            return rows
        return corrected(rows, conditions.correction, conditions.held)

    def goes_with(self, other: _Unit) -> bool:
        """Whether both can be encoded side by side."""
        return (
            self.block is not None
            and other.block is not None
            and self.group.info.type == other.group.info.type
            and self.group.conditions.factor is other.group.conditions.factor
        )


def _batches(units: Iterable[_Unit], most: int) -> Iterator[list[_Unit]]:
    """Yield units, those together that can be encoded side by side, up to `most` of them."""
    batch: list[_Unit] = []
    for unit in units:
        n_weights = sum(each.n_weights for each in (*batch, unit))
        fits = len(batch) < most and n_weights <= WEIGHTS_TOGETHER
        if batch and not (fits and unit.goes_with(batch[0])):
            yield batch
            batch = []
        batch.append(unit)
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


@dataclass(frozen=True)
class _Strip:
    """Some rows of a group, encoded both ways.

    data    by feedback; None where that can't be
    losses  squared errors on the rows that were held back, by feedback and by stock's
    """

    data: Bytes | None
    stock: Bytes
    losses: tuple[float, float]


class Encoder:
    """Makes calibrated tensors.

    tensors   of the output; rows that are made become written
    missing   chunks that are not done, by tensor, in the order of their rows
    partials  open for writing, by the number of the output
    outputs   the other side of the matrices
    """

    def __init__(
        self,
        job: FillJob,
        tensors: Mapping[str, PartialTensor],
        missing: Mapping[str, Sequence[ChunkTask]],
        partials: Mapping[int, PartialFile],
        done: Done,
        records: Records,
        workers: Workers,
        outputs: GradientFactors,
        effort: Effort,
    ) -> None:
        self._job, self._tensors, self._missing = job, tensors, missing
        self._partials, self._done, self._records = partials, done, records
        self._workers, self._outputs, self._effort = workers, outputs, effort

    def is_missing(self, tensor: str, first: int = 0, n_rows: int | None = None) -> bool:
        """Whether some of a tensor's rows, or of `n_rows` from `first` on, are not written."""
        written = self._tensors[tensor].written
        return not written[first : None if n_rows is None else first + n_rows].all()

    def make(self, groups: Sequence[RowGroup]) -> None:
        """Encode groups and write them; those of one tensor that stand side by side follow each other."""
        for name in {group.info.name for group in groups}:
            self._outputs.open(name)
        groups = list(self._workers.each(self._with_blocks, groups))
        units = [_Unit(group, *strip) for group in groups for strip in group.strips]
        n_together = max(1, min(MOST_TOGETHER, len(units) // self._workers.n_threads))
        batches = self._workers.each(self._encode, _batches(units, n_together))
        strips = (strip for batch in batches for strip in batch)
        for some in _runs(groups):
            data = [self._choose(group, [next(strips) for _ in group.strips]) for group in some]
            self._write(some[0].info.name, some[0].first, np.concatenate(data))

    def _with_blocks(self, group: RowGroup) -> RowGroup:
        return replace(group, blocks=self._outputs.blocks(group.info, group.first, group.n_rows))

    def _encode(self, units: Sequence[_Unit]) -> list[_Strip]:
        """Encode units that can be encoded side by side."""
        type_, factor = units[0].group.info.type, units[0].group.conditions.factor
        sources = [self._job.sources[unit.group.info.name].read_rows(unit.start, unit.stop) for unit in units]
        stocks = [
            self._stock(unit.group, source, unit.start) for unit, source in zip(units, sources, strict=True)
        ]
        if factor is None or not can_compensate(type_):
            return [_Strip(None, stock, (0.0, 0.0)) for stock in stocks]
        rows = [source.astype(np.float32) for source in sources]
        del sources
        wanted = [unit.wanted(own) for unit, own in zip(units, rows, strict=True)]
        blocks = [unit.block for unit in units if unit.block is not None]
        if blocks:
            sides = (block.factor for block in blocks)
            encoded = encode_side_by_side(list(zip(wanted, sides, strict=True)), type_, factor, self._effort)
        else:
            encoded = [encode_compensated(own, type_, factor, self._effort) for own in wanted]
        return [
            _Strip(data, stock, _losses(unit.group, unit.block, own, data, stock))
            for unit, own, data, stock in zip(units, rows, encoded, stocks, strict=True)
        ]

    def _stock(self, group: RowGroup, rows: Rows, start: int) -> Bytes:
        """Return rows as the stock encoder makes them, under the importances that are given or were seen."""
        tensor, type_, statistics = group.info.name, group.info.type, group.conditions.statistics
        weighting = self._job.weighting_of(RowRange(tensor, start, start + len(rows)))
        if weighting is None and (statistics.n_rows or requires_importances(type_.name)):
            weighting = ColumnWeights(statistics.importances())
        return encode_strip(rows, start, tensor, type_, weighting)

    def _choose(self, group: RowGroup, strips: Sequence[_Strip]) -> Bytes:
        """Return the better bytes of a group, and keep a record of the choice."""
        loss, stock_loss = (sum(strip.losses[which] for strip in strips) for which in (0, 1))
        calibrated = [strip.data for strip in strips if strip.data is not None]
        is_better = len(calibrated) == len(strips) and (group.conditions.held is None or loss < stock_loss)
        self._records.add(
            Record(
                tensor=group.info.name,
                first=group.first,
                n_rows=group.n_rows,
                n_cols=group.info.n_cols,
                n_seen=group.conditions.statistics.n_seen,
                has_factor=group.conditions.factor is not None,
                loss=loss,
                stock_loss=stock_loss,
                is_stock=not is_better,
            )
        )
        return np.concatenate(calibrated if is_better else [strip.stock for strip in strips])

    def _write(self, tensor: str, first: int, data: Bytes) -> None:
        """Write rows from `first` on, as far as their chunks are missing."""
        last = first + len(data)
        for task in self._missing.get(tensor, ()):
            rows = task.rows
            if not first <= rows.start < last:
                continue
            with naming(task):
                if rows.stop > last:
                    raise QuantError(f"{rows}: only rows to {last} were made")
                written = self._tensors[tensor]
                stored = in_byte_order(
                    data[rows.start - first : rows.stop - first], written.type, written.endian
                )
                self._partials[task.output].write(task.offset, stored.data)
                self._records.add_chunk(task.number, xxhash.xxh3_64_intdigest(stored.data))
                digest = digest_rows(rows, self._job.sources[tensor])
            self._done(task.number, digest)
        self._tensors[tensor].written[first:last] = True


def _losses(
    group: RowGroup, block: OutputBlock | None, rows: Floats32, data: Bytes, stock: Bytes
) -> tuple[float, float]:
    """Return the squared errors of two encodings on the rows that were held back.

    block  weighs errors of different outputs by the covariance of their gradients; None: all alike
    """
    held, n_cols = group.conditions.held, group.info.n_cols
    if held is None:
        return 0.0, 0.0
    decode = get_format(group.info.type).decode
    weights = torch.from_numpy(rows)
    moved = None if held.originals is held.x else (held.originals - held.x) @ weights.T
    losses = []
    for encoded in (data, stock):
        error = held.x @ (weights - torch.from_numpy(decode(encoded, n_cols))).T
        if moved is not None:
            error += moved
        weighed = error if block is None else error @ torch.from_numpy(block.covariance)
        losses.append(float((weighed.double() * error).sum()))
    return losses[0], losses[1]
