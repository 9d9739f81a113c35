"""Work given to real Dask workers: the bytes of threads, whatever becomes of workers and scheduler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import convert
import imatrix
import quantize
from gguf_tools.cluster.job import job_path
from gguf_tools.commands.convert import main as convert_main
from gguf_tools.commands.quantize import main as quantize_main
from gguf_tools.files.journal import journal_path
from tests.end_to_end.conftest import GOLDEN
from tests.support.dask_cluster import REPOSITORY, Processes, dask_cluster

pytest.importorskip("distributed")

MATRIX = GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"
MakeFile = Callable[[str], Path]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with dask_cluster(tmp_path_factory.mktemp("dask"), 2, "--no-nanny") as started:
        yield started


def interrupt_after(n_chunks: int) -> Callable[[object], None]:
    """Return a progress that raises KeyboardInterrupt when so many chunks are done."""
    n_left = n_chunks + 1  # the first call says that none is

    def count(state: object) -> None:
        nonlocal n_left
        n_left -= 1
        if not n_left:
            raise KeyboardInterrupt

    return count


def test_quantize_goes_from_threads_to_workers_and_back(
    processes: Processes, tiny_gguf: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # workers run elsewhere
    source = Path(os.path.relpath(tiny_gguf("bf16")))
    matrix = Path(os.path.relpath(MATRIX))
    options = quantize.QuantizeOptions(imatrix.load(matrix))
    quantize.quantize(source, "threads.gguf", "Q4_K_M", options)
    output = Path("workers.gguf")
    for scheduler, n_done in ((processes.address, 40), (None, 40), (processes.address, 40)):
        with pytest.raises(KeyboardInterrupt) as caught:
            quantize.quantize(
                source, output, "Q4_K_M", options, scheduler=scheduler, progress=interrupt_after(n_done)
            )
        assert "the same command resumes from there" in caught.value.__notes__[0]
        assert journal_path(output).exists()
    done = quantize.quantize(
        source, output, "Q4_K_M", options, scheduler=processes.address, verify=True, n_threads=1
    )
    assert done.written.n_resumed >= 117
    assert output.read_bytes() == Path("threads.gguf").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["threads.gguf", "workers.gguf"]
    words = [str(source), "again.gguf", "Q4_K_M", "--imatrix", str(matrix)]
    assert quantize_main([*words, "--reuse", "workers.gguf", "--scheduler", processes.address]) == 0
    assert Path("again.gguf").read_bytes() == output.read_bytes()


@pytest.mark.slow
def test_a_folder_in_one_pass_to_two_types(
    processes: Processes, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("Q4_0", "Q8_0"):
        convert.convert(tiny_folder, tmp_path / f"threads-{name}.gguf", outtype=name)
    output = str(tmp_path / "workers-{FTYPE}.gguf")
    words = [str(tiny_folder), "--outfile", output, "--outtype", "Q4_0,Q8_0", "-q"]
    assert convert_main([*words, "--scheduler", processes.address]) == 0
    assert capsys.readouterr().err == ""
    for name in ("Q4_0", "Q8_0"):
        made = (tmp_path / f"workers-{name}.gguf").read_bytes()
        assert made == (tmp_path / f"threads-{name}.gguf").read_bytes()


@pytest.mark.slow
def test_a_worker_with_other_code_is_refused_by_name(
    processes: Processes, tiny_gguf: MakeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    for package in ("gguf_tools", "quantize"):
        shutil.copytree(REPOSITORY / package, other / package, ignore=shutil.ignore_patterns("__pycache__"))
    (other / "quantize" / "roles.py").write_text("# another version\n")
    worker = processes.start_worker("--no-nanny", path=other)
    model, output = str(tiny_gguf("bf16")), str(tmp_path / "out.gguf")
    words = ["--force", model, output, "Q8_0", "--scheduler", processes.address]
    try:
        deadline = time.monotonic() + 30
        while quantize_main(words) == 0:  # until it has joined
            assert time.monotonic() < deadline
            capsys.readouterr()
    finally:
        worker.kill()
        worker.wait()
        processes.workers.remove(worker)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"quantize: error: {processes.address}: worker tcp://127.0.0.1:")
    assert ": runs gguf-tools 0.1.0 (" in line
    assert "), expected 0.1.0 (" in line
    # It may have joined when some chunks were done; then they are kept.
    assert (tmp_path / "out.gguf.partial").exists() == journal_path(tmp_path / "out.gguf").exists()
    assert not job_path(tmp_path / "out.gguf").exists()


@pytest.mark.slow
@pytest.mark.parametrize("memory_bytes", [4 << 30, 0], ids=["in memory", "in files"])
def test_importances_are_equal_to_the_last_bit(
    processes: Processes, tiny_folder: Path, tmp_path: Path, memory_bytes: int
) -> None:
    pytest.importorskip("torch")
    from imatrix.forward.options import ForwardOptions
    from imatrix.texts.tokens import Cut

    text = REPOSITORY / "examples" / "tiny-deepseek-v3" / "calibration.txt"
    how = ForwardOptions(n_threads=1, memory_bytes=memory_bytes)
    options = imatrix.CollectOptions(cut=Cut(128, n_chunks=6), forward=how)
    threads = imatrix.collect(tiny_folder, text, tmp_path / "threads.gguf", options)
    there = replace(options, forward=replace(how, scheduler=processes.address))
    workers = imatrix.collect(tiny_folder, text, tmp_path / "workers.gguf", there)
    assert (tmp_path / "workers.gguf").read_bytes() == (tmp_path / "threads.gguf").read_bytes()
    assert workers.perplexity == threads.perplexity
    assert sorted(path.name for path in tmp_path.iterdir()) == ["threads.gguf", "workers.gguf"]


@pytest.mark.slow
def test_measures_are_equal_to_the_last_bit(
    processes: Processes, tiny_folder: Path, tiny_gguf: MakeFile, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    import gguf_tools
    from imatrix.forward.options import ForwardOptions
    from imatrix.texts.tokens import Cut

    text = REPOSITORY / "examples" / "tiny-deepseek-v3" / "calibration.txt"
    for name in ("Q4_0", "Q8_0"):
        quantize.quantize(tiny_gguf("bf16"), tmp_path / f"{name}.gguf", name)
    files = [tmp_path / "Q4_0.gguf", tmp_path / "Q8_0.gguf"]
    options = gguf_tools.EvaluateOptions(cut=Cut(128, n_chunks=6), forward=ForwardOptions(n_threads=1))
    threads = gguf_tools.evaluate(tiny_folder, text, files, options)
    how = ForwardOptions(n_threads=1, scheduler=processes.address)
    there = replace(options, forward=how, work=tmp_path / "work")
    np.testing.assert_equal(asdict(gguf_tools.evaluate(tiny_folder, text, files, there)), asdict(threads))
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["imatrix", "quantize"])
def test_processes_of_this_machine(how: str, tiny_gguf: MakeFile, tmp_path: Path) -> None:
    text = REPOSITORY / "examples" / "tiny-deepseek-v3" / "calibration.txt"
    source, made = tiny_gguf("bf16"), {}
    for name, options in {"threads": [], "processes": ["--scheduler", "local:2"]}.items():
        output = tmp_path / f"{name}.gguf"
        words = [
            "-m",
            str(source),
            "-f",
            str(text),
            "-o",
            str(output),
            "-c",
            "128",
            "--chunks",
            "4",
            "-t",
            "1",
        ]
        if how == "quantize":
            words = [str(source), str(output), "Q4_0"]
        ran = subprocess.run(
            [sys.executable, "-m", how, *words, "-q", *options], capture_output=True, text=True, check=False
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        made[name] = output.read_bytes()
    assert made["threads"] == made["processes"]
