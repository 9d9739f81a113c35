"""Writing: complete or not there, never over an input, never twice at once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gguf_tools import FileLayout, GGUFFile, GGUFWriter, TensorInfo, Value
from gguf_tools.errors import OutputError
from gguf_tools.files.partial_file import PartialFile
from gguf_tools.format import ggml_types as types

LAYOUT = FileLayout.of({"k": Value.u32(1)}, [TensorInfo("t", (4, 64), types.F32)])
DATA = np.arange(256, dtype=np.float32)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_published_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    with GGUFWriter(path, LAYOUT) as writer:
        assert names(tmp_path) == {"out.gguf.partial"}
        assert (tmp_path / "out.gguf.partial").stat().st_size == LAYOUT.total_bytes
        writer.write(LAYOUT.offset_of("t"), DATA)
        writer.publish()
    assert names(tmp_path) == {"out.gguf"}
    with GGUFFile(path) as file:
        np.testing.assert_array_equal(file.raw("t").view(np.float32), DATA)


def test_unwritten_bytes_are_zero_even_over_a_stale_partial(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    stale = b"gguf-tools PART\n".ljust(2 * LAYOUT.total_bytes, b"\xff")
    (tmp_path / "out.gguf.partial").write_bytes(stale)
    with GGUFWriter(path, LAYOUT) as writer:
        writer.publish()
    assert path.read_bytes() == LAYOUT.header.ljust(LAYOUT.total_bytes, b"\0")


def test_abandoned_output_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    path.write_bytes(b"old")
    with GGUFWriter(path, LAYOUT) as writer:
        writer.write(0, b"x")
    assert names(tmp_path) == {"out.gguf"}
    assert path.read_bytes() == b"old"


def test_any_thread_writes_any_range(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    start = LAYOUT.offset_of("t")
    with GGUFWriter(path, LAYOUT) as writer, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: writer.write(start + 4 * i, DATA[i : i + 1]), reversed(range(256))))
        writer.publish()
    assert path.read_bytes()[start:] == DATA.tobytes()


def test_output_that_is_an_input_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.gguf"
    source.write_bytes(b"input")
    (tmp_path / "link.gguf").symlink_to(source)
    os.link(source, tmp_path / "hard.gguf")
    for name in ("in.gguf", "link.gguf", "hard.gguf"):
        with pytest.raises(OutputError, match="is an input of this run"):
            GGUFWriter(tmp_path / name, LAYOUT, inputs=[tmp_path / "other", source])
    os.rename(source, tmp_path / "x.gguf.partial")
    with pytest.raises(OutputError, match="is an input of this run"):
        GGUFWriter(tmp_path / "x.gguf", LAYOUT, inputs=[tmp_path / "x.gguf.partial"])
    assert (tmp_path / "x.gguf.partial").read_bytes() == b"input"


def test_output_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"nope/out\.gguf\.partial: can't be created: No such file"):
        GGUFWriter(tmp_path / "nope" / "out.gguf", LAYOUT)
    with pytest.raises(OutputError, match="is a folder, expected a file to write"):
        GGUFWriter(tmp_path, LAYOUT)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is a file, expected a folder"):
        GGUFWriter(tmp_path / "file" / "out.gguf", LAYOUT)


def test_unwritable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object, **kwargs: object) -> int:  # root may write anywhere
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(OutputError, match="Permission denied"):
        GGUFWriter(tmp_path / "out.gguf", LAYOUT)


def test_too_little_space_is_known_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs(tmp_path)
    fields = list(status)
    fields[4] = 0  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    with pytest.raises(OutputError, match=rf"needs {LAYOUT.total_bytes:,} bytes, 0 are free"):
        GGUFWriter(tmp_path / "out.gguf", LAYOUT)
    assert names(tmp_path) == set()


def test_write_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with GGUFWriter(tmp_path / "out.gguf", LAYOUT) as writer:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OutputError, match=r"out\.gguf\.partial: can't be written: No space left"):
            writer.write(0, b"x")
    assert names(tmp_path) == set()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    with GGUFWriter(tmp_path / "out.gguf", LAYOUT) as writer:
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:100], offset))
        writer.write(LAYOUT.offset_of("t"), DATA)
        writer.publish()
    assert (tmp_path / "out.gguf").read_bytes()[LAYOUT.data_start :] == DATA.tobytes()


def test_range_outside_the_layout_is_a_bug(tmp_path: Path) -> None:
    with GGUFWriter(tmp_path / "out.gguf", LAYOUT) as writer:
        with pytest.raises(ValueError, match="outside"):
            writer.write(LAYOUT.total_bytes - 1, b"xx")
        with pytest.raises(ValueError, match="outside"):
            writer.write(-1, b"x")


def test_second_writer_of_the_same_output_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    with GGUFWriter(path, LAYOUT) as writer:
        with pytest.raises(OutputError, match="another process is writing it"):
            GGUFWriter(path, LAYOUT)
        writer.publish()
    assert names(tmp_path) == {"out.gguf"}


def test_killed_run_leaves_only_the_partial(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "from gguf_tools import FileLayout, GGUFWriter\n"
        "writer = GGUFWriter(sys.argv[2], FileLayout.of({}, []))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, root, tmp_path / "out.gguf"], check=False)
    assert names(tmp_path) == {"out.gguf.partial"}
    with GGUFWriter(tmp_path / "out.gguf", LAYOUT) as writer:
        writer.publish()
    assert names(tmp_path) == {"out.gguf"}


def test_a_worker_that_outlives_its_run_writes_to_no_other(tmp_path: Path) -> None:
    path, run, other = tmp_path / "out.gguf", b"12345678", b"abcdefgh"
    start = LAYOUT.offset_of("t")
    with GGUFWriter(path, LAYOUT, run=run) as killed:
        killed.mark()
        late = PartialFile(killed.partial, run)
        killed.close()  # as the kernel does when a process is killed
    with GGUFWriter(path, LAYOUT, run=run) as same:
        assert same.resumed
        late.write(start, memoryview(DATA).cast("B"))
        assert os.pread(same.fileno(), 1024, start) == DATA.tobytes()
        same.close()
    with GGUFWriter(path, LAYOUT, run=other) as writer:
        assert not writer.resumed
        with pytest.raises(OutputError, match=r"out\.gguf\.partial: belongs to another run"):
            PartialFile(writer.partial, other)  # before it has a mark
        writer.mark()
        late.write(start, memoryview(DATA).cast("B"))
        with pytest.raises(OutputError, match=r"out\.gguf\.partial: belongs to another run"):
            PartialFile(writer.partial, run)
        PartialFile(writer.partial, other).sync()
        writer.publish()
    assert path.read_bytes() == LAYOUT.header.ljust(LAYOUT.total_bytes, b"\0")
