"""File systems without locks: a file says who writes, and a process that is gone holds nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_tools.commands.quantize import main as quantize
from gguf_tools.errors import OutputError
from gguf_tools.files.leftovers import forget
from gguf_tools.files.owned_folder import work_path
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.system import locks
from gguf_tools.system.locks import Taken, hold
from imatrix.forward.work_folder import WorkFolder
from tests.gguf_tools.test_writer import LAYOUT
from tests.quantize.model_files import write_mixture_model


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], autouse=True)
def without_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_outputs_are_written_all_the_same(tmp_path: Path) -> None:
    write_mixture_model(tmp_path / "in.gguf")
    words = [str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_0", "-q"]
    assert quantize(words) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"in.gguf", "out.gguf"}


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    with GGUFWriter(path, LAYOUT):
        with pytest.raises(OutputError, match=rf"another process is writing it; process {os.getpid()}$"):
            GGUFWriter(path, LAYOUT)
        assert (tmp_path / "out.gguf.partial.lock").exists()
    assert list(tmp_path.iterdir()) == []


def lock(path: Path) -> None:
    path.touch()
    fd = os.open(path, os.O_RDWR)
    try:
        hold(fd, path).release()
    finally:
        os.close(fd)


def written(path: Path, **changes: object) -> Path:
    """Write a lock of this process with `changes`; return its path."""
    file = path.with_name(f"{path.name}.lock")
    file.write_text(json.dumps({**locks._this_process(), **changes}))
    return file


def test_a_lock_of_a_process_that_is_gone_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "run"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for changes in ({"pid": ended.pid}, {"started": "12"}, {"boot": "another start of this machine"}):
        file = written(path, **changes)
        lock(path)
        assert not file.exists()
        assert {each.name for each in tmp_path.iterdir()} == {"run"}


def test_a_lock_of_another_machine_holds(tmp_path: Path) -> None:
    path = tmp_path / "run"
    file = written(path, host="elsewhere", pid=12)
    with pytest.raises(Taken, match=r"process 12 on elsewhere; if that process has ended, remove run\.lock"):
        lock(path)
    assert file.exists()


@pytest.mark.parametrize("content", ["my lock", "[1]", "\x00"])
def test_a_lock_of_somebody_else_stays(tmp_path: Path, content: str) -> None:
    file = tmp_path / "run.lock"
    file.write_text(content)
    with pytest.raises(Taken, match=r"run\.lock is no lock of ours; remove it"):
        lock(tmp_path / "run")
    assert file.read_text() == content


def test_a_lock_that_its_process_had_no_time_to_sign_is_taken_over_after_a_while(tmp_path: Path) -> None:
    file = tmp_path / "run.lock"
    file.touch()
    with pytest.raises(Taken):
        lock(tmp_path / "run")
    os.utime(file, (0, 0))
    lock(tmp_path / "run")
    assert not file.exists()


def test_advice_that_is_refused_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    test_outputs_are_written_all_the_same(tmp_path)


def test_a_work_folder_whose_run_was_killed_at_once_is_taken_over(tmp_path: Path) -> None:
    """Killed before it set its mark: all that is there is the lock, and the file that it is of."""
    folder = tmp_path / "out.work"
    folder.mkdir()
    (folder / "lock").touch()
    written(folder / "lock", started="12")
    with WorkFolder(tmp_path / "out", {"model": "a"}) as work:
        assert (folder / "lock.lock").exists()
        assert work.done < 0
    assert not (folder / "lock.lock").exists()
    forget(work_path(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []
