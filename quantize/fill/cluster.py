"""Chunks in other processes and on other machines, through a scheduler of Dask's `distributed`.

A worker may outlive its run. It does no harm: it writes only to a partial with the mark of that run, and no
other run ever takes over that file (see PartialFile and GGUFWriter). The same run, begun again, writes the
same bytes to the same places, so a late write of its earlier session changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gguf_tools.cluster.connect import Cluster
from gguf_tools.cluster.scheduler import Farm, ItemFailed
from gguf_tools.errors import ExecutionError
from quantize.fill.chunks import ChunkTask
from quantize.fill.executors import Done, WorkerSpec


class ClusterExecutor:
    """Runs chunks on the workers of a cluster; journal and publishing stay with the caller.

    output  beside which the job is posted; a worker that does not see it can't work
    """

    def __init__(self, cluster: Cluster, output: Path) -> None:
        self._cluster, self._output = cluster, output

    def run(self, tasks: Iterable[ChunkTask], spec: WorkerSpec, done: Done) -> None:
        """Run all tasks; `done` is called in this thread.

        raises  ExecutionError for the first task that fails, ClusterError if the workers can't do any or the
                scheduler is gone, and what `done` raises
        """
        items = list(tasks)
        if not items:
            return

        def finish(task: ChunkTask, digest: int) -> None:
            done(task.number, digest)

        def look(task: ChunkTask) -> str:
            row = spec.wrong_row(task)
            if row is None:
                return ""
            return f"{task.rows.tensor}: row {row} is not in the file; does it see the same files?"

        with self._cluster.offer(spec, self._output) as job:
            try:
                Farm(self._cluster, job, finish, look=look).run(items)
            except ItemFailed as failed:
                text = failed.text if failed.error else f"{failed.item}: {failed.text}"
                raise ExecutionError(text, failed.item) from None
