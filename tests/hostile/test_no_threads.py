"""A user who may have no more processes or threads is told so in one line."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from gguf_tools.commands.quantize import main as quantize
from gguf_tools.system import locks
from tests.quantize.model_files import write_mixture_model

ROOT = Path(__file__).parents[2]


def refuse(*args: object) -> None:
    raise RuntimeError("can't start new thread")


def test_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mixture_model(tmp_path / "in.gguf")
    monkeypatch.setattr(Thread, "start", refuse)
    assert quantize([str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_0", "-q"]) == 1
    said = "can't start new thread: this user may have no more processes (ulimit -u)"
    assert capsys.readouterr().err == f"quantize: error: {said}\n"
    assert not (tmp_path / "out.gguf").exists()


def test_another_fault_is_none_of_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a fault of ours")

    write_mixture_model(tmp_path / "in.gguf")
    monkeypatch.setattr(Thread, "start", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        quantize([str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_0", "-q"])


IMPORT = """
import os, threading
from gguf_tools.system import locks
locks._can_start = lambda n_threads: False
locks._MANY_PROCESSES = 1 << 62
seen = []
import importlib.abc, sys
class Spy(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numpy":
            seen.append(os.environ.get("OPENBLAS_NUM_THREADS"))
sys.meta_path.insert(0, Spy())
locks.import_numpy()
print(seen, os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NPROC)[0] < 0, reason="needs a limit of processes")
@pytest.mark.parametrize("before", ["2", pytest.param(None, marks=pytest.mark.slow)])
def test_numpy_is_imported_with_one_thread(before: str | None) -> None:
    env = {key: text for key, text in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
    env |= {} if before is None else {"OPENBLAS_NUM_THREADS": before}
    command = [sys.executable, "-c", IMPORT]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"['1'] {before}"


def test_threads_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert locks._can_start(3)
    monkeypatch.setattr(Thread, "start", refuse)
    assert not locks._can_start(1)
