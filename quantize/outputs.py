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

from gguf_tools.journal import Journal, journal_path
from gguf_tools.layout import FileLayout
from gguf_tools.writer import GGUFWriter, refuse_inputs
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
    refuse_inputs(journal_path(outputs[0].path), inputs)
    numbers = _number_chunks(outputs, job)
    layouts = {output.path.name: output.layout for output in outputs}
    about = describe_run(layouts, job, inputs)
    with ExitStack() as stack:
        journal = stack.enter_context(Journal(outputs[0].path, about, restart=restart))
        parts: list[Part] = []
        try:
            for number, (output, chunks) in enumerate(zip(outputs, numbers, strict=True)):
                inode = journal.published.get(number)
                if _has_its_name(output, inode):
                    continue
                whole = inode if all(chunk in journal.done for chunk in chunks) else None
                writer = GGUFWriter(output.path, output.layout, inputs, run=journal.run, whole=whole)
                stack.enter_context(writer)
                parts.append(Part(number, writer, chunks))
                if not writer.resumed:
                    journal.forget(chunks)
                    writer.mark()
            n_resumed = len(journal.done)

            def finish(part: Part) -> None:
                journal.sync(other.writer.fileno() for other in parts if other.writer.is_open)
                journal.finish_output(part.number, os.fstat(part.writer.fileno()).st_ino)
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
