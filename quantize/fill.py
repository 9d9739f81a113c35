"""Fill: encode the chunks of output files and write them where the layouts say.

This is the one machine behind both commands: a layout says which type every tensor becomes and where it goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gguf_tools.endian import swap_bytes
from gguf_tools.journal import Journal
from gguf_tools.writer import GGUFWriter
from quantize.chunks import ChunkTask, layout_chunks
from quantize.encode import FillJob, encode_chunk
from quantize.executors import Executor

Progress = Callable[[int], None]
"""Called after every chunk with the number of bytes written; from any thread."""


def no_progress(n_bytes: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Part:
    """An output file that is being filled.

    number  which output of the run it is
    writer  of the file
    chunks  the numbers of its chunks
    """

    number: int
    writer: GGUFWriter
    chunks: range


def fill(
    parts: Sequence[Part],
    job: FillJob,
    executor: Executor,
    progress: Progress,
    journal: Journal,
    finish: Callable[[Part], None],
) -> None:
    """Fill the chunks that the journal doesn't know to be done; call `finish` for each part that is whole.

    raises  ExecutionError for the first chunk, or finish, that fails
    """
    homes = {info.name: (part, info.type) for part in parts for info in part.writer.layout.tensors}
    left = {part.number: sum(number not in journal.done for number in part.chunks) for part in parts}
    counting = threading.Lock()
    closing = threading.Lock()  # no file is closed while it is being synced

    def tasks() -> Iterator[ChunkTask]:
        spans = job.rows_per_weights()
        for part in parts:
            for task in layout_chunks(part.writer.layout, spans, first_number=part.chunks.start):
                if task.number in journal.done:
                    progress(task.n_bytes)
                else:
                    yield task

    def work(task: ChunkTask) -> None:
        part, target = homes[task.tensor]
        data = encode_chunk(task, target, job)
        if part.writer.layout.endian == "big":
            data = swap_bytes(target, data)
        part.writer.write(task.offset, data.data)
        journal.finish(task.number)
        if journal.is_sync_due():
            with closing:
                journal.sync(part.writer.fileno() for part in parts if part.writer.is_open)
        progress(task.n_bytes)
        with counting:
            left[part.number] -= 1
            is_whole = not left[part.number]
        if is_whole:
            with closing:
                finish(part)

    for part in parts:
        if not left[part.number]:
            finish(part)
    executor.run(tasks(), work)
