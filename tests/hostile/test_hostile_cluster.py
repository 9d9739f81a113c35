"""Schedulers that are none or that die, and workers that say done and wrote nothing."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import quantize
from gguf_tools.cluster.connect import Cluster
from gguf_tools.errors import ToolkitError
from quantize.cli import main as quantize_main
from tests.hostile.test_changed_inputs import after_chunks, write_source
from tests.support.dask_cluster import dask_cluster

pytest.importorskip("distributed")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "in.gguf")


@pytest.mark.parametrize("address", ["x", "", "foo://x", "tcp://[::1", "tls://127.0.0.1:1", "127.0.0.1:1"])
def test_what_is_no_scheduler_is_one_line(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], address: str
) -> None:
    assert quantize_main(["--scheduler", address, str(source), str(tmp_path / "out.gguf"), "Q8_0", "-q"])
    gc.collect()
    said = capfd.readouterr().err
    assert said.startswith("quantize: error: "), said
    assert said.count("\n") == 1, said


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
        with pytest.raises(ToolkitError, match=f"{processes.address}: the scheduler is gone"):
            quantize.quantize(source, tmp_path / "out.gguf", "Q8_0", scheduler=processes.address)
    assert capfd.readouterr().err == ""


def test_a_scheduler_that_dies_is_one_line(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with dask_cluster(tmp_path / "dask", 1, "--no-nanny") as processes:
        die = after_chunks(2, lambda: os.killpg(processes.scheduler.pid, signal.SIGKILL))
        with pytest.raises(ToolkitError, match=f"{processes.address}: the scheduler is gone") as caught:
            quantize.quantize(
                source, tmp_path / "out.gguf", "Q8_0", scheduler=processes.address, progress=die
            )
    del caught
    gc.collect()
    assert capfd.readouterr().err == ""
