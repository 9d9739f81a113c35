"""Making tensors: rows are encoded under what they multiply, compared with stock's, and written.

Rows that share statistics are a part: a matrix, one head's rows, one expert's. A part is encoded twice, by
feedback and as the stock encoder does it, and both are tried on rows that were held back. A part that
feedback does not improve keeps stock's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
import xxhash

from forward.workers import Workers
from gguf_tools.endian import swap_bytes
from gguf_tools.errors import BadActivation, BadMoments, QuantError
from gguf_tools.tensors import TensorInfo
from gguf_tools.writer import PartialFile
from quality.calibrate.inputs import Held
from quality.calibrate.moments import Statistics
from quality.calibrate.output_side import OutputBlock, OutputSide
from quality.calibrate.overlay import WrittenTensor
from quality.calibrate.records import Record, Records
from quality.calibrate.target import corrected, correction
from quantize.compensate.base import Effort
from quantize.compensate.factor import Factor
from quantize.compensate.feedback import encode_compensated
from quantize.compensate.rounders import can_compensate
from quantize.compensate.two_sided import encode_two_sided
from quantize.fill.chunks import ChunkTask
from quantize.fill.digests import RowsDigest
from quantize.fill.encode import FillJob
from quantize.fill.executors import Done, naming
from quantize.formats import get_format
from quantize.formats.base import Bytes, Floats32, Rows
from quantize.formats.codecs import requires_importances
from quantize.weighting import ColumnWeights

_STRIP_ROWS = 256
"""Rows of a task: enough for full vectors of rows, few enough for many threads."""


@dataclass(frozen=True)
class Under:
    """What rows are encoded under.

    statistics  of what they multiply
    factor      of its second moments; None where these can't be used
    change      what is added to W is W times this, float32 (n_cols, n_cols); None: nothing
    held        rows on which encodings are compared; None: there are none
    """

    statistics: Statistics
    factor: Factor | None
    change: Floats32 | None
    held: Held | None

    @classmethod
    def of(cls, statistics: Statistics, held: Held | None, name: str) -> Under:
        """Return what follows from statistics.

        name    of a matrix, for messages
        raises  BadActivation for NaN or infinity in what it multiplies
        """
        if not statistics.is_finite:
            raise BadActivation(f"{name}: its input has NaN or infinity")
        factor = change = None
        if statistics.n_rows:
            try:
                factor = Factor.of(statistics.own)
            except BadMoments:
                factor = None
            else:
                moved = correction(statistics)
                change = None if moved is None else np.ascontiguousarray(moved, np.float32)
        return cls(statistics, factor, change, held)


@dataclass(frozen=True)
class Part:
    """Rows of a tensor that share statistics.

    first   row of the tensor, counted through its matrices
    blocks  the other side of the rows, in runs of them; empty where only what they multiply counts
    """

    info: TensorInfo
    first: int
    n_rows: int
    under: Under
    blocks: Sequence[OutputBlock] = ()

    @property
    def strips(self) -> Iterator[tuple[int, int, OutputBlock | None]]:
        """Yield the rows of each task, with their block."""
        for block in self.blocks:
            yield self.first + block.start, self.first + block.stop, block
        for start in range(self.first, self.first + self.n_rows, _STRIP_ROWS) if not self.blocks else ():
            yield start, min(start + _STRIP_ROWS, self.first + self.n_rows), None


@dataclass(frozen=True)
class _Strip:
    """Some rows of a part, encoded both ways.

    data    by feedback; None where that can't be
    losses  squared errors on the rows that were held back, by feedback and by stock's
    """

    data: Bytes | None
    stock: Bytes
    losses: tuple[float, float]


class Maker:
    """Makes calibrated tensors.

    tensors   of the output; rows that are made become written
    missing   chunks that are not done, by tensor, in the order of their rows
    partials  open for writing, by the number of the output
    outputs   the other side of the matrices
    """

    def __init__(
        self,
        job: FillJob,
        tensors: Mapping[str, WrittenTensor],
        missing: Mapping[str, Sequence[ChunkTask]],
        partials: Mapping[int, PartialFile],
        done: Done,
        records: Records,
        workers: Workers,
        outputs: OutputSide,
        effort: Effort,
    ) -> None:
        self._job, self._tensors, self._missing = job, tensors, missing
        self._partials, self._done, self._records = partials, done, records
        self._workers, self._outputs, self._effort = workers, outputs, effort

    def is_missing(self, tensor: str, first: int = 0, n_rows: int | None = None) -> bool:
        """Whether some of a tensor's rows, or of `n_rows` from `first` on, are not written."""
        written = self._tensors[tensor].written
        return not written[first : None if n_rows is None else first + n_rows].all()

    def make(self, parts: Sequence[Part]) -> None:
        """Encode parts and write them; those of one tensor stand side by side, in the order of their rows."""
        parts = [
            replace(part, blocks=self._outputs.blocks(part.info, part.first, part.n_rows)) for part in parts
        ]
        units = ((part, *strip) for part in parts for strip in part.strips)
        strips = self._workers.each(self._encode, units)
        for name, group in groupby(parts, lambda part: part.info.name):
            some, data = list(group), []
            for part in some:
                data.append(self._choose(part, [next(strips) for _ in part.strips]))
            self._write(name, some[0].first, np.concatenate(data))

    def _encode(self, unit: tuple[Part, int, int, OutputBlock | None]) -> _Strip:
        part, start, stop, block = unit
        type_, under = part.info.type, part.under
        source = self._job.sources[part.info.name].read_rows(start, stop)
        stock = self._stock(part, source, start)
        if under.factor is None or not can_compensate(type_):
            return _Strip(None, stock, (0.0, 0.0))
        rows = source.astype(np.float32)
        wanted = rows if under.change is None else corrected(rows, under.change, under.held)
        if block is None:
            data = encode_compensated(wanted, type_, under.factor, self._effort)
        else:
            data = encode_two_sided(wanted, type_, under.factor, block.factor, self._effort)
        return _Strip(data, stock, _losses(part, block, rows, data, stock))

    def _stock(self, part: Part, rows: Rows, start: int) -> Bytes:
        """Return rows as the stock encoder makes them, under the importances that are given or were seen."""
        resolved = self._job.importances.get(part.info.name)
        if resolved is not None:
            return get_format(part.info.type).encode(rows, resolved.weighting_of_row(start))
        statistics, type_ = part.under.statistics, part.info.type
        if not statistics.n_rows and not requires_importances(type_.name):
            return get_format(type_).encode(rows, None)
        return get_format(type_).encode(rows, ColumnWeights(statistics.importances()))

    def _choose(self, part: Part, strips: Sequence[_Strip]) -> Bytes:
        """Return the better bytes of a part, and keep a record of the choice."""
        loss, stock_loss = (sum(strip.losses[which] for strip in strips) for which in (0, 1))
        calibrated = [strip.data for strip in strips if strip.data is not None]
        is_better = len(calibrated) == len(strips) and (part.under.held is None or loss < stock_loss)
        self._records.add(
            Record(
                tensor=part.info.name,
                first=part.first,
                n_rows=part.n_rows,
                n_cols=part.info.n_cols,
                n_seen=part.under.statistics.n_seen,
                has_factor=part.under.factor is not None,
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
                stored = data[rows.start - first : rows.stop - first].reshape(-1)
                if self._tensors[tensor].is_big_endian:
                    stored = swap_bytes(self._tensors[tensor].type, stored)
                self._partials[task.output].write(task.offset, stored.data)
                self._records.add_chunk(task.number, xxhash.xxh3_64_intdigest(stored.data))
                digest = self._digest(task)
            self._done(task.number, digest)
        self._tensors[tensor].written[first:last] = True

    def _digest(self, task: ChunkTask) -> int:
        """Return the digest of a chunk's rows, as other executors return it."""
        digest = RowsDigest()
        digest.update(self._job.sources[task.rows.tensor].read_rows(task.rows.start, task.rows.stop))
        return digest.value()


def _losses(
    part: Part, block: OutputBlock | None, rows: Floats32, data: Bytes, stock: Bytes
) -> tuple[float, float]:
    """Return the squared errors of two encodings on the rows that were held back.

    block  weighs errors of different outputs by the covariance of their gradients; None: all alike
    """
    held, n_cols = part.under.held, part.info.n_cols
    if held is None:
        return 0.0, 0.0
    decode = get_format(part.info.type).decode
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
