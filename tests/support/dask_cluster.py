"""A Dask scheduler and its workers: processes, as a user starts them, that tests may kill; or threads."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gguf_tools.cluster.connect import Cluster

REPOSITORY = Path(__file__).parents[2]
_PATIENCE_SECONDS = 60.0


class Processes:
    """A scheduler and workers.

    folder   for their files and logs
    address  of the scheduler
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "scheduler.json"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.scheduler = self._start("scheduler", "--port", "0", "--host", "127.0.0.1", "--no-dashboard")
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._file.exists() or not self._file.stat().st_size:
            assert time.monotonic() < deadline, "the scheduler does not start"
            assert self.scheduler.poll() is None, (self.folder / "scheduler.log").read_text()
            time.sleep(0.05)
        self.address: str = json.loads(self._file.read_text())["address"]

    def start_worker(self, *options: str, path: Path = REPOSITORY) -> subprocess.Popen[bytes]:
        """Start a worker with one thread; `path` is where it has the toolkit from."""
        worker = self._start(
            "worker", "--nthreads", "1", "--no-dashboard", "--memory-limit", "0", *options, path=path
        )
        self.workers.append(worker)
        return worker

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of scheduler and workers so far."""
        ticks = 0
        for process in (*self.workers, self.scheduler):
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        for process in (*self.workers, self.scheduler):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(self, what: str, *options: str, path: Path = REPOSITORY) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "dask", what, "--scheduler-file", str(self._file), *options]
        if what == "worker":
            words += ["--local-directory", str(self.folder)]
        environment = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
        log = self.folder / ("scheduler.log" if what == "scheduler" else f"worker-{len(self.workers)}.log")
        with open(log, "wb") as file:
            return subprocess.Popen(
                words, stdout=file, stderr=file, cwd=self.folder, env=environment, start_new_session=True
            )


@contextmanager
def dask_cluster(folder: Path, n_workers: int, *options: str) -> Iterator[Processes]:
    """Run a scheduler and workers for the time of this block."""
    folder.mkdir(exist_ok=True)
    processes = Processes(folder)
    try:
        for _ in range(n_workers):
            processes.start_worker(*options)
        yield processes
    finally:
        processes.close()


@contextmanager
def workers_in_threads() -> Iterator[Cluster]:
    """Run a scheduler and two workers in threads of this process: what they do can be patched."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=2,
            processes=False,
            threads_per_worker=1,
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
        ) as local,
        Client(local, set_as_default=False) as client,
    ):
        yield Cluster(client, "here:1")
