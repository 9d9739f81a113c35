"""Fill: encode the chunks of output files and write them where the layouts say.

This is the one machine behind both commands: a layout says which type every tensor becomes and where it goes.
What older files have already is copied from there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gguf_tools.copying import copy_range
from gguf_tools.endian import swap_bytes
from gguf_tools.ggml_types import GGMLType
from gguf_tools.journal import Journal
from gguf_tools.progress import Progress
from gguf_tools.writer import GGUFWriter
from quantize.fill.chunks import ChunkTask, layout_chunks, tensor_chunks
from quantize.fill.encode import FillJob, encode_strips
from quantize.fill.executors import Executor
from quantize.fill.precompile import Encoding
from quantize.fill.provenance import UNKNOWN, RowsDigest
from quantize.fill.reuse import Candidate, OldFiles, OldTensor


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


class Filling:
    """The filling of all outputs of a run.

    parts     to be filled
    progress  told of every chunk, also of those that the journal knows to be done
    journal   told of every chunk that has been written
    finish    called for each part that is whole
    digests   let the journal have the digests of what was encoded, see provenance.py
    old       files that may have some of the tensors already
    reused    how many tensors of each of these were taken, by path
    damaged   tensors that would have been, but don't have the bytes that they should
    """

    def __init__(
        self,
        parts: Sequence[Part],
        job: FillJob,
        progress: Progress,
        journal: Journal,
        finish: Callable[[Part], None],
        *,
        digests: bool = False,
        old: OldFiles | None = None,
    ) -> None:
        self.reused = Counter(dict.fromkeys(old.usable, 0) if old else {})
        self.damaged: list[OldTensor] = []
        self._parts = parts
        self._job = job
        self._progress = progress
        self._journal = journal
        self._finish = finish
        self._digests = digests
        self._homes = {info.name: (part, info.type) for part in parts for info in part.writer.layout.tensors}
        self._left = {
            part.number: sum(number not in journal.done for number in part.chunks) for part in parts
        }
        self._candidates = {} if old is None else dict(self._find_candidates(old))
        self._counting = threading.Lock()
        self._closing = threading.Lock()  # no file is closed while it is being synced

    def encodings(self) -> Iterator[Encoding]:
        """Yield how each tensor will be encoded, of those that certainly will be."""
        for part in self._parts:
            for info in part.writer.layout.tensors if self._left[part.number] else ():
                if self._is_encoded(info.name, info.type) and info.name not in self._candidates:
                    yield Encoding.of(self._job, info.name, info.type)

    def run(self, executor: Executor) -> None:
        """Fill the chunks that are not done.

        raises  ExecutionError for the first chunk, or finish, that fails
        """
        for part in self._parts:
            if not self._left[part.number]:
                self._finish(part)
        refused: list[Candidate] = []

        def work(task: ChunkTask) -> None:
            candidate = self._candidates.get(task.tensor)
            if candidate is None:
                self._encode(task)
            elif self._look(task, candidate) and not self._reuse(candidate):
                refused.append(candidate)

        executor.run(self._tasks(), work)
        executor.run((task for candidate in refused for task in candidate.tasks), self._encode)
        assert not any(self._left.values()), "a part is not whole"

    def _tasks(self) -> Iterator[ChunkTask]:
        spans = self._job.rows_per_weights()
        for part in self._parts:
            for task in layout_chunks(part.writer.layout, spans, first_number=part.chunks.start):
                if task.number in self._journal.done:
                    self._progress(task.n_bytes)
                else:
                    yield task

    def _encode(self, task: ChunkTask) -> None:
        part, target = self._homes[task.tensor]
        digest = RowsDigest() if self._digests and self._is_encoded(task.tensor, target) else None
        for offset, data in encode_strips(task, target, self._job, digest):
            if part.writer.layout.endian == "big":
                data = swap_bytes(target, data)
            part.writer.write(offset, data.data)
        self._complete(task, UNKNOWN if digest is None else digest.value())

    def _is_encoded(self, tensor: str, target: GGMLType) -> bool:
        return self._job.sources[tensor].type != target

    def _complete(self, task: ChunkTask, digest: int) -> None:
        part, _ = self._homes[task.tensor]
        part.writer.begin_writeback(task.offset, task.n_bytes)
        self._journal.finish(task.number, digest)
        if self._journal.is_sync_due():
            with self._closing:
                self._journal.sync(part.writer.fileno() for part in self._parts if part.writer.is_open)
        self._progress(task.n_bytes)
        with self._counting:
            self._left[part.number] -= 1
            is_whole = not self._left[part.number]
        if is_whole:
            with self._closing:
                self._finish(part)

    def _find_candidates(self, old: OldFiles) -> Iterator[tuple[str, Candidate]]:
        """Yield the tensors that an older file may have."""
        spans = self._job.rows_per_weights()
        done = self._journal.done
        for part in self._parts:
            layout = part.writer.layout
            number = part.chunks.start
            for info, offset in zip(layout.tensors, layout.offsets, strict=True):
                chunks = list(tensor_chunks(info, offset, spans.get(info.name), first_number=number))
                number += len(chunks)
                found = old.find(info) if self._is_encoded(info.name, info.type) else ()
                if found:
                    yield info.name, Candidate(info, found, chunks, done)

    def _look(self, task: ChunkTask, candidate: Candidate) -> bool:
        """Digest the source of a chunk; return whether that was the last of its tensor."""
        digest = RowsDigest()
        digest.update(self._job.sources[task.tensor].read_rows(task.row_start, task.row_stop))
        with self._counting:
            return candidate.add(task.number, digest.value())

    def _reuse(self, candidate: Candidate) -> bool:
        """Take the tensor from an older file that has what it would become, if there is one."""
        old = candidate.match(self._job)
        if old is None:
            return False
        if not old.is_sound(self._job):
            self.damaged.append(old)
            return False
        info = candidate.info
        writer = self._homes[info.name][0].writer
        copy_range(
            old.home.fileno(),
            old.home.data_offset(info.name),
            writer.fileno(),
            writer.layout.offset_of(info.name),
            info.n_bytes,
            f"{old.home.path}: tensor {info.name!r}",
            str(writer.partial),
        )
        with self._counting:
            self.reused[old.path] += 1
        for task in candidate.tasks:
            self._complete(task, candidate.digests[task.number])
        return True
