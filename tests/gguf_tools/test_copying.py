"""Copying ranges: the same bytes by every way there is, and an error that names the file at fault."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_tools.edit import rewrite
from gguf_tools.edit.rewrite import copy_range
from gguf_tools.errors import OutputError, TruncatedError

DATA = np.random.default_rng(1).integers(0, 256, 3_000_000, np.uint8).tobytes()

Copy = Callable[..., int]


def refuse(code: int) -> Copy:
    def copy_file_range(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    return copy_file_range


def returns_zero(*args: object) -> int:
    return 0


def after(n_calls: int, then: Copy, whole: Copy = os.copy_file_range) -> Copy:
    """A kernel that copies a little, `n_calls` times, and then does something else."""
    calls = iter(range(n_calls))

    def copy_file_range(source: int, target: int, count: int, *offsets: int) -> int:
        return then() if next(calls, None) is None else whole(source, target, min(count, 1000), *offsets)

    return copy_file_range


KERNELS: dict[str, Copy] = {
    "as it is": os.copy_file_range,
    "short": after(10**9, returns_zero),
    "zero": returns_zero,
    "zero in mid-copy": after(5, returns_zero),
    "refuses in mid-copy": after(5, refuse(errno.EOPNOTSUPP)),
    "EXDEV": refuse(errno.EXDEV),
    "ENOSYS": refuse(errno.ENOSYS),
    "EPERM": refuse(errno.EPERM),
    "EINVAL": refuse(errno.EINVAL),
}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Descriptors of a file that holds DATA and of an empty one."""
    (tmp_path / "source").write_bytes(DATA)
    source = os.open(tmp_path / "source", os.O_RDONLY)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    yield source, target
    os.close(source)
    os.close(target)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_way_copies_the_range(
    files: tuple[int, int], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = files
    monkeypatch.setattr(os, "copy_file_range", KERNELS[kernel])
    pieces: list[int] = []
    copy_range(source, 12_345, target, 678, 2_500_001, "a", "b", advance=pieces.append)
    assert os.pread(target, len(DATA), 0) == bytes(678) + DATA[12_345 : 12_345 + 2_500_001]
    assert sum(pieces) == 2_500_001
    assert os.lseek(source, 0, os.SEEK_CUR) == os.lseek(target, 0, os.SEEK_CUR) == 0


@given(data=st.binary(max_size=300), a=st.integers(0, 300), b=st.integers(0, 300), at=st.integers(0, 99))
@settings(deadline=None)
def test_any_range_goes_anywhere(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, a: int, b: int, at: int
) -> None:
    start, stop = sorted(min(cut, len(data)) for cut in (a, b))
    folder = tmp_path_factory.mktemp("range")
    (folder / "source").write_bytes(data)
    with open(folder / "source", "rb") as source, open(folder / "target", "w+b") as target:
        copy_range(source.fileno(), start, target.fileno(), at, stop - start, "a", "b")
        assert target.read() == (bytes(at) + data[start:stop] if stop > start else b"")


def test_holes_are_zeros(tmp_path: Path) -> None:
    with open(tmp_path / "source", "wb") as hole:
        hole.truncate(5 << 20)
    with open(tmp_path / "source", "rb") as source, open(tmp_path / "target", "w+b") as target:
        target.write(b"\xff" * (5 << 20))
        target.flush()
        copy_range(source.fileno(), 0, target.fileno(), 0, 5 << 20, "a", "b")
        target.seek(0)
        assert target.read() == bytes(5 << 20)


def test_threads_copy_between_the_same_files(files: tuple[int, int]) -> None:
    source, target = files
    step = 7_001
    starts = range(0, len(DATA), step)

    def copy(start: int) -> None:
        copy_range(source, start, target, start, min(step, len(DATA) - start), "a", "b")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(copy, starts))
    assert os.pread(target, len(DATA) + 1, 0) == DATA


def test_within_one_file(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as file:
        file.write(b"0123456789")
        file.flush()
        copy_range(file.fileno(), 2, file.fileno(), 6, 4, "a", "b")
        file.seek(0)
        assert file.read() == b"0123452345"


@pytest.mark.parametrize("kernel", ["as it is", "EXDEV"])
def test_source_that_became_shorter_is_named(
    files: tuple[int, int], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", KERNELS[kernel])
    with pytest.raises(
        TruncatedError, match=r"^in\.gguf: tensor 'x' ends at byte 3000000, 1 bytes early; .* become shorter"
    ):
        copy_range(*files[:1], 100, files[1], 0, len(DATA) - 99, "in.gguf: tensor 'x'", "out.gguf")


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """A stand-in for a full disk: files of this process end at `n_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kernel", ["as it is", "EXDEV"])
def test_target_that_is_full_is_named(
    files: tuple[int, int], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", KERNELS[kernel])
    full = pytest.raises(OutputError, match=r"^out\.gguf: can't be written: File too large")
    with file_size_limit(2_000_000), full:
        copy_range(files[0], 0, files[1], 0, len(DATA), "in.gguf", "out.gguf")
    assert os.pread(files[1], len(DATA), 0) == DATA[:2_000_000]


def test_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    with open(tmp_path / "target", "wb") as target, pytest.raises(IsADirectoryError, match=r"'in\.gguf'"):
        copy_range(folder, 0, target.fileno(), 0, 10, "in.gguf", "out.gguf")
    os.close(folder)


def test_short_writes_are_continued(files: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "copy_file_range", returns_zero)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:100_000], offset))
    copy_range(files[0], 0, files[1], 0, len(DATA), "a", "b")
    assert os.pread(files[1], len(DATA) + 1, 0) == DATA


def test_the_buffer_is_small(files: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    read = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(buffers[0].nbytes)
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "copy_file_range", returns_zero)
    monkeypatch.setattr(os, "preadv", preadv)
    copy_range(files[0], 0, files[1], 0, len(DATA), "a", "b")
    assert max(sizes) <= rewrite._BUFFER_BYTES < len(DATA)
