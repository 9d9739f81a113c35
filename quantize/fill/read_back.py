"""Reading back what workers say they have written.

A worker may say so, and the bytes are not there: its folder is another one under the same name, or a page was
lost on the way to a server. A file with such holes looks whole. So this process reads rows back and encodes
them itself: the ends of the first chunks of every worker before they count as done, and a row of every chunk
before a file gets its name. Files are opened anew each time, because only then does the client of a network
file system ask its server what there is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gguf_tools.format.block_layouts import swap_bytes
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.header import Endian
from gguf_tools.system.files import open_file, read_at
from quantize.fill.chunks import ChunkTask, RowRange
from quantize.fill.encode import FillJob, encode_rows

_MOST_OF_COLUMNS = 4
"""Chunks that are read back of a tensor whose rows lie in columns of the source: one row takes all of it."""


def wrong_row(
    path: Path, task: ChunkTask, rows: Iterable[int], target: GGMLType, job: FillJob, endian: Endian
) -> int | None:
    """Return the first of some rows of a chunk whose bytes in a file are not what encoding gives, if any.

    rows  of the tensor; where rows are interleaved, their groups are looked at
    """
    group = target.rows_interleaved
    row_bytes = task.n_bytes // len(task.rows)
    fd = open_file(path, os.O_RDONLY)
    try:
        for row in rows:
            start = task.rows.start + (row - task.rows.start) // group * group
            stop = min(start + group, task.rows.stop)
            expected = encode_rows(RowRange(task.rows.tensor, start, stop), target, job)
            stored = swap_bytes(target, expected) if endian == "big" else expected
            offset = task.offset + (start - task.rows.start) * row_bytes
            if read_at(fd, stored.nbytes, offset) != np.ascontiguousarray(stored).tobytes():
                return start
    finally:
        os.close(fd)
    return None


def ends(task: ChunkTask) -> tuple[int, int]:
    """Return the first row of a chunk and its last."""
    return task.rows.start, task.rows.stop - 1


def some_row(task: ChunkTask) -> int:
    """Return a row of a chunk, another one in each chunk but the same each time."""
    return task.rows.start + (task.number * 2654435761 + 1013904223) % 2**32 % len(task.rows)


def to_read_back(tasks: Sequence[ChunkTask], job: FillJob) -> Iterator[ChunkTask]:
    """Yield which of the chunks of one tensor are read back before its file gets its name."""
    if not tasks or job.is_calibrated(tasks[0].rows.tensor):
        return
    by_rows = job.sources[tasks[0].rows.tensor].by_rows
    yield from tasks[:: 1 if by_rows else -(-len(tasks) // _MOST_OF_COLUMNS)]


def wrong_chunks(
    path: Path, tasks: Iterable[tuple[ChunkTask, GGMLType]], job: FillJob, endian: Endian, n_threads: int
) -> list[ChunkTask]:
    """Return the chunks of a file of which a row is not what encoding gives.

    tasks  chunks that were written, and the types that they were encoded to
    """

    def look(each: tuple[ChunkTask, GGMLType]) -> ChunkTask | None:
        task, target = each
        row = wrong_row(path, task, [some_row(task)], target, job, endian)
        return None if row is None else task

    with ThreadPoolExecutor(max(1, n_threads)) as pool:
        return [task for task in pool.map(look, tasks) if task is not None]
