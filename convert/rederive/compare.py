"""One tensor made again, some rows at a time, and compared with what a file has while it is made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from random import Random
from threading import Event

import numpy as np

from convert.rederive.ways import Way
from gguf_tools.format.tensors import TensorInfo
from quantize.fill.chunks import UNKNOWN, RowRange, RowsDigest, TensorChunks, rows_alike
from quantize.fill.encode import Target, encode_strips
from quantize.fill.provenance import digest_importance, tensor_provenance
from quantize.fill.same_bytes import differing_blocks
from quantize.fill.sources import SourceTensor


@dataclass(frozen=True)
class Compared:
    """How rows that were made again compare with those of a file.

    n_rows         rows that were compared
    n_blocks       blocks in them
    n_differ       blocks with other bytes
    n_rows_differ  rows with such blocks, or groups of rows where rows are interleaved
    rows           numbers of the first of them, at most MOST_ROWS of each chunk
    number         provenance of what was made, UNKNOWN where not all of it was
    """

    n_rows: int
    n_blocks: int
    n_differ: int
    n_rows_differ: int = 0
    rows: tuple[int, ...] = ()
    number: int = UNKNOWN

    @property
    def is_same(self) -> bool:
        return not self.n_differ


MOST_ROWS = 32


def sampled(info: TensorInfo, rows_per_weights: int | None, n_rows: int, seed: int) -> list[RowRange]:
    """Choose rows of a tensor by a seed, in whole groups of interleaved rows; all where it has no more.

    No range crosses from one matrix into the next, or from one row of importances.
    """
    group = info.type.rows_interleaved
    n_groups = info.n_rows // group
    drawn = Random(f"{seed} {info.name}").sample(range(n_groups), min(n_groups, -(-n_rows // group)))
    alike = rows_alike(info, rows_per_weights)
    ranges: list[RowRange] = []
    for first in (number * group for number in sorted(drawn)):
        last = ranges[-1] if ranges else None
        if last is not None and last.stop == first and first % alike:
            ranges[-1] = RowRange(info.name, last.start, first + group)
        else:
            ranges.append(RowRange(info.name, first, first + group))
    return ranges


def whole(info: TensorInfo, rows_per_weights: int | None) -> list[RowRange]:
    """Cut a tensor into the chunks that its provenance is made of."""
    return [task.rows for task in TensorChunks.of(info, rows_per_weights=rows_per_weights)]


def compare(
    info: TensorInfo,
    stored: SourceTensor,
    way: Way,
    ranges: Sequence[RowRange],
    pool: Executor,
    *,
    is_whole: bool,
    give_up: bool,
) -> Compared:
    """Make rows of a tensor in one way, and compare them.

    ranges    of its rows, from first to last
    is_whole  whether these are the chunks of all its rows
    give_up   stop at the first block that differs
    raises    what `encode_strips` does
    """
    done = Event()

    def look(rows: RowRange) -> tuple[Compared, int]:
        return (Compared(0, 0, 0), UNKNOWN) if done.is_set() else _compare_rows(info, stored, way, rows)

    parts: list[Compared] = []
    digests: list[int] = []
    for part, digest in pool.map(look, ranges):
        parts.append(part)
        digests.append(digest)
        if part.n_differ and give_up:
            done.set()
    number = UNKNOWN
    if is_whole and way.sources.is_encoded(info.name, info.type):
        importance = digest_importance(way.sources.importances.get(info.name), info.type.name)
        number = tensor_provenance(info, way.sources.tensors[info.name].type, digests, importance)
    return Compared(
        sum(part.n_rows for part in parts),
        sum(part.n_blocks for part in parts),
        sum(part.n_differ for part in parts),
        sum(part.n_rows_differ for part in parts),
        tuple(row for part in parts for row in part.rows),
        number,
    )


def _compare_rows(info: TensorInfo, stored: SourceTensor, way: Way, rows: RowRange) -> tuple[Compared, int]:
    digest = RowsDigest()
    group, first = info.type.rows_interleaved, rows.start
    n_blocks = n_differ = 0
    found: list[int] = []
    for (made,) in encode_strips(rows, [Target(info.type, way.sources)], digest):
        n_rows = made.size // info.row_bytes
        wrong = differing_blocks(info.type, made, stored.raw_rows(first, first + n_rows), n_rows)
        n_blocks += wrong.size
        n_differ += int(wrong.sum())
        found += (first + group * np.flatnonzero(wrong.any(axis=1))).tolist()
        first += n_rows
    return Compared(len(rows), n_blocks, n_differ, len(found), tuple(found[:MOST_ROWS])), digest.value()


def chance_to_slip(tensors: Iterator[TensorInfo], n_rows: int, n_changed: int) -> float:
    """Compute the largest chance that a sample misses a change of some rows of one tensor, 0 to 1.

    n_rows     of each tensor that are looked at
    n_changed  rows that are changed, wherever their author likes, without knowing the seed
    """
    return max((_missed(info.n_rows, n_rows, n_changed) for info in tensors), default=0.0)


def _missed(n_rows: int, n_looked_at: int, n_changed: int) -> float:
    """Compute the chance that none of the rows that are looked at is changed."""
    if n_looked_at + n_changed > n_rows:
        return 0.0
    return math.comb(n_rows - n_changed, n_looked_at) / math.comb(n_rows, n_looked_at)
