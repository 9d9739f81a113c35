"""Schedulers that are none or that die, and workers that say done and wrote nothing."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quantize
from gguf_tools.cluster import connect
from gguf_tools.cluster.connect import Cluster
from gguf_tools.cluster.scheduler import Farm
from gguf_tools.commands.quantize import main as quantize_main
from gguf_tools.errors import ClusterError, ToolkitError
from gguf_tools.files.partial_file import PartialFile
from quantize.fill.chunks import ChunkTask, RowsDigest
from quantize.fill.filling import Filler
from tests.hostile.test_changed_inputs import after_chunks, write_source
from tests.support.dask_cluster import REPOSITORY, dask_cluster, workers_in_threads

pytest.importorskip("distributed")

DIES_WHEN_ASKED = REPOSITORY / "tests" / "support" / "dies_when_asked.py"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "in.gguf")


NOBODY_THERE = pytest.param("127.0.0.1:1", marks=pytest.mark.slow)  # waits for a connection's time limit


ODD = (pytest.param(address, marks=pytest.mark.slow) for address in ("", "foo://x", "tls://127.0.0.1:1"))


@pytest.mark.parametrize("address", ["x", "tcp://[::1", *ODD, NOBODY_THERE])
def test_what_is_no_scheduler_is_one_line(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], address: str
) -> None:
    assert quantize_main(["--scheduler", address, str(source), str(tmp_path / "out.gguf"), "Q8_0", "-q"])
    gc.collect()
    said = capfd.readouterr().err
    assert said.startswith("quantize: error: "), said
    assert said.count("\n") == 1, said


@pytest.mark.slow  # it waits for the time limit of a connection
def test_a_scheduler_that_dies_while_workers_are_asked_is_one_line(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with dask_cluster(tmp_path / "dask", 1, "--no-nanny") as processes:

        def die_and_ask(cluster: Cluster, *arguments: Any) -> dict[str, str]:
            os.killpg(processes.scheduler.pid, signal.SIGKILL)
            processes.scheduler.wait()
            return asked(cluster, *arguments)

        asked = Cluster._ask_all
        monkeypatch.setattr(Cluster, "_ask_all", die_and_ask)
        with pytest.raises(ToolkitError, match=f"{processes.address}: the scheduler has stopped"):
            quantize.quantize(source, tmp_path / "out.gguf", "Q8_0", scheduler=processes.address)
    assert capfd.readouterr().err == ""


def test_a_scheduler_that_dies_is_one_line(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with dask_cluster(tmp_path / "dask", 1, "--no-nanny") as processes:
        die = after_chunks(2, lambda: os.killpg(processes.scheduler.pid, signal.SIGKILL))
        with pytest.raises(ToolkitError, match=f"{processes.address}: the scheduler has stopped") as caught:
            quantize.quantize(
                source, tmp_path / "out.gguf", "Q8_0", scheduler=processes.address, progress=die
            )
    del caught
    gc.collect()
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_is_asked_is_not_missed(source: Path, tmp_path: Path) -> None:
    quantize.quantize(source, tmp_path / "right.gguf", "Q8_0")
    with dask_cluster(tmp_path / "dask", 1, "--no-nanny") as processes:
        dying = processes.start_worker("--no-nanny", "--preload", str(DIES_WHEN_ASKED))
        with connect.open_cluster(processes.address) as cluster:
            cluster.client.wait_for_workers(2, timeout=60)
            quantize.quantize(source, tmp_path / "out.gguf", "Q8_0", scheduler=processes.address)
        assert dying.wait() == -signal.SIGKILL
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "right.gguf").read_bytes()


# ---- workers that lie


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a scheduler whose workers are threads of this process."""
    with workers_in_threads() as started:
        monkeypatch.setitem(connect._open, "here:1", started)
        yield "here:1"


def lie_from(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Let workers leave out what they should write, from the chunk with this number on."""
    run = Filler.run

    def lie(filler: Filler, task: ChunkTask) -> int:
        if task.number < first:
            return run(filler, task)
        digest = RowsDigest()
        digest.update(filler.sources.tensors[task.rows.tensor].read_rows(task.rows.start, task.rows.stop))
        return digest.value()

    monkeypatch.setattr(Filler, "run", lie)


def test_a_worker_that_writes_nothing_is_found_at_its_first_chunk(
    source: Path, tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie_from(monkeypatch, 0)
    with pytest.raises(ClusterError, match=r"worker inproc://.* done, but blk\..*: row 0 is not in the file"):
        quantize.quantize(source, tmp_path / "out.gguf", "Q8_0", scheduler=cluster)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.gguf"]


def test_a_hole_that_comes_later_is_found_before_the_file_gets_its_name(
    source: Path, tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.gguf"
    with monkeypatch.context() as lying:
        lie_from(lying, 7)
        lying.setattr(Farm, "_refuse_undone", lambda *_: None)
        with pytest.raises(ToolkitError, match=r"2 of the 9 chunks that were read back .*, the first blk\.2"):
            quantize.quantize(source, output, "Q8_0", scheduler=cluster)
    assert not output.exists()
    assert quantize.quantize(source, output, "Q8_0", scheduler=cluster).written.n_resumed == 7
    quantize.quantize(source, tmp_path / "right.gguf", "Q8_0")
    assert output.read_bytes() == (tmp_path / "right.gguf").read_bytes()


def test_types_that_are_made_together_are_looked_at_too(
    source: Path, tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PartialFile, "write", lambda *_: None)
    with pytest.raises(ClusterError, match="row 0 is not in the file"):
        quantize.quantize_many(source, tmp_path / "{ftype}.gguf", ["Q8_0", "Q4_0"], scheduler=cluster)
