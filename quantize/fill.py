"""Fill: encode every chunk of an output file and write it where the layout says.

This is the one machine behind both commands: the layout says which type every tensor becomes and where
it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from gguf_tools.endian import swap_bytes
from gguf_tools.writer import GGUFWriter
from quantize.chunks import ChunkTask, layout_chunks
from quantize.encode import FillJob, encode_chunk
from quantize.executors import Executor

Progress = Callable[[int], None]
"""Called after every chunk with the number of bytes written; from any thread."""


def no_progress(n_bytes: int) -> None:
    """Tell nobody."""


def fill(writers: Sequence[GGUFWriter], job: FillJob, executor: Executor, progress: Progress) -> None:
    """Fill every byte range of `writers` (one per shard); the caller publishes them.

    raises  ExecutionError for the first chunk that fails
    """
    homes = {info.name: (writer, info.type) for writer in writers for info in writer.layout.tensors}
    swapped = any(writer.layout.endian == "big" for writer in writers)

    def work(task: ChunkTask) -> None:
        writer, target = homes[task.tensor]
        data = encode_chunk(task, target, job)
        if swapped:
            data = swap_bytes(target, data)
        writer.write(task.offset, data.data)
        progress(task.n_bytes)

    spans = job.rows_per_weights()
    executor.run(chain.from_iterable(layout_chunks(writer.layout, spans) for writer in writers), work)
