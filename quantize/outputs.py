"""Outputs: filled in any order, each published as soon as it is whole, gone on with after an interruption.

Beside the first output lies a journal of the chunks that are done (see gguf_tools/journal.py). A run that
fails or is killed leaves it and the partials; the same run again, and no other, goes on from there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gguf_tools.journal import Journal
from gguf_tools.layout import FileLayout
from gguf_tools.writer import GGUFWriter
from quantize.chunks import layout_chunks
from quantize.encode import FillJob
from quantize.executors import make_executor
from quantize.fill import Part, Progress, fill
from quantize.fingerprint import describe_run


@dataclass(frozen=True)
class Output:
    """A file to be written: where, and every byte offset in it."""

    path: Path
    layout: FileLayout


@dataclass(frozen=True)
class Written:
    """What `write_outputs` has done.

    n_chunks   of all outputs
    n_resumed  of these, how many an earlier run had done
    """

    n_chunks: int
    n_resumed: int


def write_outputs(
    outputs: Iterable[Output],
    job: FillJob,
    n_threads: int,
    progress: Progress,
    inputs: Iterable[Path],
    *,
    restart: bool = False,
) -> Written:
    """Fill all `outputs` and publish each when it is whole.

    inputs   files that are being read, which no output may replace
    restart  forget what an interrupted run has left
    raises   ExecutionError for the first chunk that fails, OutputError for a file that can't be written, and
             for what another run has left; what is done stays for the next run
    """
    outputs, inputs = tuple(outputs), tuple(inputs)
    numbers = _number_chunks(outputs, job)
    layouts = {output.path.name: output.layout for output in outputs}
    about = describe_run(layouts, job, inputs)
    with ExitStack() as stack:
        journal = stack.enter_context(Journal(outputs[0].path, about, restart=restart))
        parts: list[Part] = []
        try:
            for number, (output, chunks) in enumerate(zip(outputs, numbers, strict=True)):
                if not _has_its_name(output, journal.published.get(number)):
                    part = Part(number, _open_writer(output, chunks, journal, inputs), chunks)
                    parts.append(part)
                    stack.enter_context(part.writer)
            n_resumed = len(journal.done)

            def finish(part: Part) -> None:
                journal.finish_output(part.number, part.writer.seal())
                part.writer.publish()

            fill(parts, job, make_executor(n_threads), progress, journal, finish)
        except BaseException as error:
            if journal.done:
                done = f"{len(journal.done)} of {numbers[-1].stop} chunks are done and kept"
                error.add_note(f"{done}: the same command goes on from there")
            else:
                for part in parts:
                    part.writer.discard()
                journal.remove()
            raise
        journal.remove()
    return Written(numbers[-1].stop, n_resumed)


def _number_chunks(outputs: Sequence[Output], job: FillJob) -> list[range]:
    """Return the numbers of the chunks of each output, counted through all of them."""
    spans = job.rows_per_weights()
    ranges = []
    start = 0
    for output in outputs:
        stop = start + sum(1 for _ in layout_chunks(output.layout, spans))
        ranges.append(range(start, stop))
        start = stop
    return ranges


def _has_its_name(output: Output, inode: int | None) -> bool:
    """Whether the file that an earlier session sealed with this inode is in its place."""
    try:
        found = os.stat(output.path)
    except OSError:
        return False
    return found.st_ino == inode and found.st_size == output.layout.total_bytes


def _open_writer(output: Output, chunks: range, journal: Journal, inputs: Iterable[Path]) -> GGUFWriter:
    """Return the writer of an output; where its partial isn't there, its chunks are not done either."""
    is_whole = all(number in journal.done for number in chunks)
    writer = GGUFWriter(output.path, output.layout, inputs, run=journal.run, is_whole=is_whole)
    if not writer.resumed:
        journal.forget(chunks)
    return writer
