"""Encodes rows under what they multiply, and keeps the method's bytes where they prove better than stock's.

Rows that share statistics are a group: a matrix, one head's rows, one expert's. Its strips are encoded both
ways, and their rows judged by what they cost under the moments (quantize.rounding.judge). A group that is not
better on held-out rows keeps the stock encoder's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gguf_tools.format.tensors import TensorInfo
from imatrix.calibrate.run.output import ChunkErrors, Record, Writer
from imatrix.calibrate.run.strips import EncodedStrip, HeldErrors, Strip, StripExecutor
from imatrix.calibrate.statistics.conditions import Conditions
from imatrix.calibrate.statistics.gradient_factors import GradientFactors, OutputBlock
from imatrix.calibrate.statistics.gradients import row_pieces
from imatrix.forward.workers import Workers
from quantize.formats.base import Bytes
from quantize.rounding.methods import Method

_STRIP_ROWS = 256
"""Rows of a task: enough for full vectors of rows, few enough for many threads."""

_MOST_TOGETHER, _WEIGHTS_TOGETHER = 4, 8 << 20
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
    def strips(self) -> Iterator[Strip]:
        """Yield the rows of each task."""
        for block in self.blocks:
            yield self._strip(self.first + block.start, self.first + block.stop, block)
        last = self.first + self.n_rows
        for start in range(self.first, last, _STRIP_ROWS) if not self.blocks else ():
            yield self._strip(start, min(start + _STRIP_ROWS, last), None)

    def _strip(self, start: int, stop: int, block: OutputBlock | None) -> Strip:
        return Strip(self.info, start, stop, self.conditions, block)


class GroupEncoder:
    """Encodes the groups of a run.

    strips     encodes their strips
    gradients  the factors at the outputs of the matrices
    """

    def __init__(
        self, strips: StripExecutor, gradients: GradientFactors, workers: Workers, writer: Writer
    ) -> None:
        self._strips, self._gradients = strips, gradients
        self.workers, self.writer = workers, writer

    @property
    def n_at_once(self) -> int:
        """How many batches of strips are encoded at the same time."""
        return self._strips.n_at_once

    def make(self, groups: Sequence[RowGroup]) -> None:
        """Encode groups and write them; those of one tensor that stand side by side follow each other."""
        for name in {group.info.name for group in groups}:
            self._gradients.open(name)

        def with_blocks(group: RowGroup) -> RowGroup:
            return replace(group, blocks=self._gradients.blocks(group.info, group.first, group.n_rows))

        groups = list(self.workers.each(with_blocks, groups))
        strips = [strip for group in groups for strip in group.strips]
        n_together = max(1, min(_MOST_TOGETHER, len(strips) // self.n_at_once))
        encoded = (each for batch in self._strips.each(_batches(strips, n_together)) for each in batch)
        for run in _runs(groups):
            data = [self._choose(group, [next(encoded) for _ in group.strips]) for group in run]
            self.writer.write(run[0].info.name, run[0].first, np.concatenate(data))

    def _choose(self, group: RowGroup, strips: Sequence[EncodedStrip]) -> Bytes:
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
                n_seen=group.conditions.n_seen,
                has_factor=group.conditions.factor is not None,
                error=error.total,
                stock_error=stock_error.total,
                is_stock=not is_better,
                chunks=tuple(
                    ChunkErrors(chunk, error.by_chunk[chunk], each)
                    for chunk, each in sorted(stock_error.by_chunk.items())
                ),
                in_nats=bool(group.blocks),
                is_close=error.is_close_to(stock_error),
            )
        )
        return np.concatenate(by_method if is_better else [strip.stock for strip in strips])


def encoding_bytes(method: Method, n_rows: int, n_cols: int, n_weights: int, n_threads: int) -> int:
    """Count the bytes of encoding at a time, of matrices of (n_rows, n_cols) with `n_weights` in all."""
    _, stop = next(row_pieces(n_rows))
    of_block = stop * n_cols
    together = min(max(of_block, _WEIGHTS_TOGETHER), _MOST_TOGETHER * of_block)
    return method.weight_bytes * min(n_threads * together, n_weights)


def _batches(strips: Iterable[Strip], most: int) -> Iterator[list[Strip]]:
    """Yield strips, those together that can be encoded side by side, up to `most` of them."""
    batch: list[Strip] = []
    for strip in strips:
        n_weights = sum(each.n_weights for each in (*batch, strip))
        fits = len(batch) < most and n_weights <= _WEIGHTS_TOGETHER
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
