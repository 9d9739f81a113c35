"""Workers that are killed, stopped or frozen in the middle of a run, schedulers that die: the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import imatrix
import quantize
from gguf_tools.cluster import scheduler as farm
from gguf_tools.cluster.job import job_path
from gguf_tools.commands.quantize import main as quantize_main
from tests.end_to_end.conftest import GOLDEN
from tests.support.dask_cluster import Processes, dask_cluster

pytest.importorskip("distributed")
pytestmark = pytest.mark.slow

MATRIX = GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"
TYPE = "IQ3_S"  # it takes long
N_KILLED = 20
MakeFile = Callable[[str], Path]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with dask_cluster(tmp_path / "dask", 3, "--no-nanny") as started:
        yield started


@pytest.fixture(scope="module")
def expected(tiny_gguf: MakeFile, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("expected") / "out.gguf"
    quantize.quantize(tiny_gguf("bf16"), path, TYPE, importances=imatrix.load(MATRIX))
    return path.read_bytes()


@contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread during this block; the event is set at its end."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def words(source: Path, output: Path, processes: Processes) -> list[str]:
    return [str(source), str(output), TYPE, "--imatrix", str(MATRIX), "-q", "--scheduler", processes.address]


def test_workers_that_are_killed_at_random(
    processes: Processes, tiny_gguf: MakeFile, tmp_path: Path, expected: bytes
) -> None:
    rng = random.Random(0)
    n_killed = 0

    def kill(over: threading.Event) -> None:
        nonlocal n_killed
        while not over.wait(rng.uniform(0.2, 1.5)):
            number = rng.randrange(len(processes.workers))
            worker = processes.workers.pop(number)
            worker.send_signal(signal.SIGKILL)
            worker.wait()
            n_killed += 1
            processes.start_worker("--no-nanny")

    n_runs = 0
    while n_killed < N_KILLED:
        output = tmp_path / f"out-{n_runs}.gguf"
        with meanwhile(kill):
            assert quantize_main(words(tiny_gguf("bf16"), output, processes)) == 0
        assert output.read_bytes() == expected
        n_runs += 1
    print(f"{n_killed} workers killed in {n_runs} runs")


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGTERM])
def test_a_worker_that_hangs_or_is_told_to_stop(
    processes: Processes,
    tiny_gguf: MakeFile,
    tmp_path: Path,
    expected: bytes,
    monkeypatch: pytest.MonkeyPatch,
    how: signal.Signals,
) -> None:
    pace = farm.Pace(patience=3.0, patience_factor=2.0)
    monkeypatch.setattr(farm, "Pace", lambda: pace)
    output = tmp_path / "out.gguf"

    def stop(over: threading.Event) -> None:
        while not output.with_name("out.gguf.partial").exists():
            time.sleep(0.01)
        over.wait(1.0)
        processes.workers[0].send_signal(how)

    with meanwhile(stop):
        assert quantize_main(words(tiny_gguf("bf16"), output, processes)) == 0
    assert output.read_bytes() == expected


def test_ctrl_c_is_for_the_command_alone(tiny_gguf: MakeFile, tmp_path: Path, expected: bytes) -> None:
    output = tmp_path / "out.gguf"
    command = [sys.executable, "-m", "quantize", str(tiny_gguf("bf16")), str(output), TYPE, "-q"]
    command += ["--imatrix", str(MATRIX), "--scheduler", "local:2"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=hear_ctrl_c
    ) as process:
        wait_for_chunks(output, 30)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes of the command
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said.startswith("quantize: interrupted; ")
    assert said.endswith(" chunks are done and kept: the same command resumes from there\n")
    assert said.count("\n") == 1
    assert quantize_main(command[3:-2]) == 0
    assert output.read_bytes() == expected


def hear_ctrl_c() -> None:
    """Undo what a shell does to commands in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_for_chunks(output: Path, n_chunks: int) -> None:
    """Wait until a run has done so many chunks, about."""
    journal = output.with_name(output.name + ".journal")
    while not journal.exists() or len(journal.read_bytes().partition(b"\n")[2]) < 20 * n_chunks:
        time.sleep(0.01)


def test_a_scheduler_that_dies(
    processes: Processes,
    tiny_gguf: MakeFile,
    tmp_path: Path,
    expected: bytes,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out.gguf"
    partial = output.with_name("out.gguf.partial")

    def kill(over: threading.Event) -> None:
        wait_for_chunks(output, 20)
        processes.scheduler.kill()

    command = words(tiny_gguf("bf16"), output, processes)
    with meanwhile(kill):
        assert quantize_main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"quantize: error: {processes.address}: the scheduler has stopped; start it and its workers again; "
    )
    assert line.endswith(" chunks are done and kept: the same command resumes from there")
    assert partial.exists()
    assert not job_path(output).exists()
    assert quantize_main(command[:-2]) == 0
    assert output.read_bytes() == expected
