"""One chunk after the other in the calling thread: the simplest executor, and the one to debug with."""

from __future__ import annotations

from collections.abc import Iterable

from quantize.fill.chunks import ChunkTask
from quantize.fill.executors.base import Done, WorkerSpec, naming


class SerialExecutor:
    def run(self, tasks: Iterable[ChunkTask], spec: WorkerSpec, done: Done) -> None:
        """Run all tasks; raises ExecutionError for the first that fails, and what `done` raises."""
        with spec.open() as worker:
            for task in tasks:
                with naming(task):
                    digest = worker.run(task)
                done(task.number, digest)
