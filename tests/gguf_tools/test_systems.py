"""What one system does otherwise than the others, where nothing else here would notice."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numpy.random import mtrand

from gguf_tools.errors import BadArgument, BadRequest
from gguf_tools.files.early_checks import refuse_shared
from gguf_tools.files.named_files import output_path, output_prefix
from gguf_tools.scanning.templates.process import start_worker
from gguf_tools.system import files, settings

LIMIT = 10


def refusing(call: Any) -> Any:
    """Return a function of os that moves LIMIT bytes at most, as macOS moves less than 2 GiB."""

    def limited(fd: int, what: Any, offset: int) -> Any:
        parts = what if isinstance(what, list) else [what]
        if sum(each if isinstance(each, int) else len(each) for each in parts) > LIMIT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(fd, what, offset)

    return limited


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="reads otherwise here")
def test_no_call_moves_more_than_a_system_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pread", "preadv", "pwrite"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    monkeypatch.setattr(files, "_CALL_BYTES", LIMIT)
    fd = files.open_file(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    data = bytes(range(35))
    files.write_all(fd, data, 3)
    buffer = bytearray(len(data))
    assert files.fill(fd, memoryview(buffer), 3) == len(data)
    assert buffer == data
    assert files.read_at(fd, len(data), 3) == data[:LIMIT]
    assert files.read_at(fd, len(data), 30) == data[27:]
    os.close(fd)


def status(**fields: int) -> Any:
    return type("Status", (), fields)


def test_the_number_of_a_file_fits_in_eight_bytes() -> None:
    """ReFS has numbers of 16 bytes; journals have room for 8."""
    assert files.file_number(status(st_ino=(7 << 64) + 5)) == 5


@pytest.mark.parametrize(("is_windows", "changed"), [(True, 9), (False, 4)])
def test_the_last_change_of_a_file(is_windows: bool, changed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Windows, a file's ctime is the time at which it was made."""
    monkeypatch.setattr(files, "IS_WINDOWS", is_windows)
    assert files.changed_ns(status(st_ctime_ns=4, st_mtime_ns=9)) == changed


def test_two_outputs_have_one_name_in_other_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = {"figures": tmp_path / "A.json", "a page": tmp_path / "a.json"}
    monkeypatch.setattr(files, "_HAS_ONE_CASE", False)
    refuse_shared(outputs, [])
    monkeypatch.setattr(files, "_HAS_ONE_CASE", True)
    with pytest.raises(BadRequest, match=r"a page .*a\.json: is an input or another output .*A\.json"):
        refuse_shared(outputs, [])


@pytest.mark.parametrize("named", [output_path, output_prefix])
def test_either_slash_ends_the_name_of_a_folder(named: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SLASHES", ("\\", "/"))
    with pytest.raises(BadArgument, match="names no file"):
        named("none\\")


def test_a_worker_finds_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python does not start in Windows without SYSTEMROOT."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: started.append(how["env"]))
    monkeypatch.setenv("SYSTEMROOT", "C:\\Windows")
    monkeypatch.setenv("OURS", "alone")
    start_worker("json.tool")
    assert started == [
        {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "SYSTEMROOT": "C:\\Windows"}
    ]


def test_blas_is_found_beside_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows looks for a function in the library that it is asked for alone, not in those linked with it."""
    usual = settings._blas("get")
    if getattr(usual, "__name__", "") == "<lambda>":
        pytest.skip("numpy has another library here")
    monkeypatch.setattr(settings, "lapack_lite", mtrand)  # has nothing to do with it
    assert settings._blas("get")() == usual()
