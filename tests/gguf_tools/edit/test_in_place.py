"""Headers changed in place: after any crash, the file is old or new, or can be made old again."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_tools.edit import in_place
from gguf_tools.errors import OutputError
from tests.support.killing import Mode, killed_at

OLD, NEW, REST = b"old header" * 1000, b"new HEADER" * 1000, b"data" * 50


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(OLD + REST)
    return path


def replace(path: Path, header: bytes = NEW) -> None:
    with in_place.locked(path) as fd:
        in_place.replace_header(fd, path, header)


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


def leave_undo(path: Path) -> bytes:
    """Leave NAME.undo of an edit that was killed before it wrote the header; returns its content."""
    assert any(killed_at(n, partial(replace, path)) and in_place.undo_path(path).exists() for n in range(20))
    return in_place.undo_path(path).read_bytes()


def test_header_is_replaced(path: Path) -> None:
    replace(path)
    assert path.read_bytes() == NEW + REST
    assert names(path) == ["m.gguf"]
    assert not in_place.restore(path)


def test_every_step_is_durable_before_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that goes down may have lost whatever was not synced."""
    calls: list[str] = []

    def name_of(fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).name

    def recorded(name: str, call: Callable[..., Any], *, of_fd: bool) -> None:
        def wrapped(*args: Any, **options: Any) -> Any:
            file = name_of(args[0]) if of_fd else Path(args[0]).name
            calls.append(f"{name} {re.sub('[.][0-9a-f]{24}[.]', '.HEX.', file)}")
            return call(*args, **options)

        monkeypatch.setattr(os, name, wrapped)

    for name, of_fd in (("pwrite", True), ("fsync", True), ("rename", False), ("unlink", False)):
        recorded(name, getattr(os, name), of_fd=of_fd)
    replace(path)
    folder = path.parent.name
    assert calls == [
        "fsync m.gguf.undo.HEX.partial",
        "rename m.gguf.undo.HEX.partial",
        f"fsync {folder}",
        "pwrite m.gguf",
        "fsync m.gguf",
        "unlink m.gguf.undo",
        f"fsync {folder}",
    ]


@pytest.mark.parametrize("mode", ["before", "torn"])
def test_killed_at_any_call_the_file_is_old_or_new(path: Path, mode: Mode) -> None:
    states: set[bytes] = set()
    for n in range(100):
        path.write_bytes(OLD + REST)
        in_place.undo_path(path).unlink(missing_ok=True)
        killed = killed_at(n, partial(replace, path), mode)
        left = path.read_bytes()
        states.add(left)
        restored = in_place.restore(path)
        found = path.read_bytes()
        assert found == (OLD + REST if restored else left)
        assert found in (OLD + REST, NEW + REST)
        assert not in_place.undo_path(path).exists()
        assert not in_place.restore(path)
        if not killed:
            break
    else:
        pytest.fail("was killed every time")
    assert {OLD + REST, NEW + REST} <= states
    assert (len(states) == 3) == (mode == "torn"), "a header torn in half was seen too"


@pytest.mark.parametrize("mode", ["before", "torn"])
def test_killed_while_restoring(path: Path, mode: Mode) -> None:
    undo = leave_undo(path)
    for n in range(100):
        path.write_bytes(NEW[:5000] + OLD[5000:] + REST)
        in_place.undo_path(path).write_bytes(undo)
        killed = killed_at(n, partial(in_place.restore, path), mode)
        in_place.restore(path)
        assert path.read_bytes() == OLD + REST
        assert not in_place.undo_path(path).exists()
        if not killed:
            return
    pytest.fail("was killed every time")


@given(mixture=st.lists(st.tuples(st.integers(0, 9999), st.integers(1, 3000)), max_size=8))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mixture_of_old_and_new_is_restored(path: Path, mixture: list[tuple[int, int]]) -> None:
    path.write_bytes(OLD + REST)
    undo, keep = in_place.undo_path(path), path.parent / "keep"
    if not keep.exists():
        keep.write_bytes(leave_undo(path))
    undo.write_bytes(keep.read_bytes())
    header = bytearray(OLD)
    for start, n_bytes in mixture:
        header[start : start + n_bytes] = NEW[start : start + n_bytes]
    path.write_bytes(header + REST)
    assert in_place.restore(path)
    assert path.read_bytes() == OLD + REST


def test_old_header_can_be_put_back_by_hand(path: Path) -> None:
    assert leave_undo(path).startswith(OLD)


@pytest.mark.parametrize(
    "content",
    [b"X" + OLD[1:] + REST, OLD + REST + b"x", OLD + REST[:-1], OLD[:100], b""],
    ids=["other header", "longer", "shorter", "a stub", "empty"],
)
def test_undo_of_another_state_is_refused(path: Path, content: bytes) -> None:
    undo = leave_undo(path)
    path.write_bytes(content)
    with pytest.raises(OutputError, match=r"m\.gguf\.undo: was kept for another state of m\.gguf; if"):
        in_place.restore(path)
    assert path.read_bytes() == content
    assert in_place.undo_path(path).read_bytes() == undo


@pytest.mark.parametrize("damage", ["short", "changed", "foreign", "empty"])
def test_undo_that_is_damaged_or_of_strangers_is_refused(path: Path, damage: str) -> None:
    undo = leave_undo(path)
    damaged = {"short": undo[:-1], "changed": b"X" + undo[1:], "foreign": b"my notes", "empty": b""}[damage]
    in_place.undo_path(path).write_bytes(damaged)
    with pytest.raises(OutputError, match=r"m\.gguf\.undo: isn't what an interrupted edit leaves; move it"):
        in_place.restore(path)
    assert path.read_bytes() == OLD + REST
    assert in_place.undo_path(path).read_bytes() == damaged


@pytest.mark.parametrize("failing", ["pwrite", "fsync"])
def test_a_full_disk_leaves_the_old_header(path: Path, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is written by pwrite; the first file that is synced is NAME.undo."""
    call = getattr(os, failing)
    failed: list[str] = []

    def full(fd: int, *args: object) -> object:
        if not failed:
            failed.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(fd, *args)

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OutputError, match=r"can't be written.*No space left"):
        replace(path)
    assert re.fullmatch({"pwrite": r"m\.gguf", "fsync": r"m\.gguf\.undo\..*\.partial"}[failing], failed[0])
    assert path.read_bytes() == OLD + REST
    assert names(path) == ["m.gguf"]


def test_interruption_leaves_the_old_header(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.fsync
    written: list[bytes] = []

    def interrupted(fd: int) -> None:
        whole(fd)
        if path.read_bytes().startswith(NEW) and not written:
            written.append(NEW)
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace(path)
    assert written
    assert path.read_bytes() == OLD + REST
    assert names(path) == ["m.gguf"]


def test_undo_is_as_private_as_the_file(path: Path) -> None:
    path.chmod(0o600)
    leave_undo(path)
    assert in_place.undo_path(path).stat().st_mode & 0o777 == 0o600


def test_one_at_a_time(path: Path) -> None:
    with in_place.locked(path) as fd:
        with pytest.raises(OutputError, match=r"m\.gguf: another process is changing it"):
            replace(path)
        in_place.undo_path(path).write_bytes(b"being written")
        with pytest.raises(OutputError, match="another process is changing it"):
            in_place.restore(path)
        in_place.undo_path(path).unlink()
        in_place.replace_header(fd, path, NEW)
    replace(path, OLD)
    assert path.read_bytes() == OLD + REST


def test_a_file_that_was_replaced_before_the_lock_is_not_changed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.open

    def open_then_replace(name: Path, *args: int) -> int:
        fd = whole(name, *args)
        path.rename(path.with_name("before"))
        path.write_bytes(b"another")
        return fd

    monkeypatch.setattr(os, "open", open_then_replace)
    with pytest.raises(OutputError, match="another process is changing it"), in_place.locked(path):
        pass


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"nope: can't be changed: No such file"):
        replace(tmp_path / "nope")
