"""Journals: what survives a kill, a crash of the machine, a torn record; and whose they are."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from gguf_tools.errors import OutputError
from gguf_tools.files import journal as module
from gguf_tools.files.journal import Journal
from gguf_tools.files.run_lock import first_difference
from gguf_tools.system import locks

ABOUT = {"source": {"a.gguf": "12 bytes"}, "type of": {"t": "Q4_0"}}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.gguf"


def journal_file(output: Path) -> Path:
    return output.with_name("out.gguf.journal")


def reboot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text(str(random.random()))
    monkeypatch.setattr(locks, "_BOOT_ID", boot)


def test_what_is_finished_is_there_next_time(output: Path) -> None:
    with Journal(output, ABOUT) as journal:
        assert (journal.done, journal.published) == ({}, {})
        journal.finish(3)
        journal.finish(5, digest=2**64 - 1)
        journal.finish_output(0, inode=77)
        run = journal.run
    with Journal(output, ABOUT) as journal:
        assert journal.done == {3: 0, 5: 2**64 - 1}
        assert journal.published == {0: 77}
        assert journal.run == run
        journal.forget(range(3, 5))
        assert journal.done == {5: 2**64 - 1}
    with Journal(output, ABOUT) as journal:
        assert journal.done == {5: 2**64 - 1}
        journal.finish(3)
    with Journal(output, ABOUT) as journal:
        assert journal.done == {3: 0, 5: 2**64 - 1}
        journal.remove()
    assert not journal_file(output).exists()


def test_only_one_process_has_it(output: Path) -> None:
    with Journal(output, ABOUT), pytest.raises(OutputError, match=r"out\.gguf\.journal: another process"):
        Journal(output, ABOUT)
    Journal(output, ABOUT).close()


def test_another_run_is_refused_with_the_difference(output: Path) -> None:
    with Journal(output, ABOUT) as journal:
        journal.finish(1)
    other = {**ABOUT, "type of": {"t": "Q8_0"}}
    with pytest.raises(OutputError, match="type of t was Q4_0, and is Q8_0 now; restart=True starts over"):
        Journal(output, other)
    with Journal(output, other, restart=True) as journal:
        assert journal.done == {}
        journal.finish(1)
    with pytest.raises(OutputError, match="is Q4_0 now"):
        Journal(output, ABOUT)


def test_another_run_that_has_done_nothing_is_no_hindrance(output: Path) -> None:
    with Journal(output, ABOUT) as journal:
        run = journal.run
    with Journal(output, {"type of": {}}) as journal:
        assert journal.run != run
        journal.finish(1)
    with Journal(output, {"type of": {}}) as journal:
        assert journal.done == {1: 0}


def test_any_truncation_gives_a_prefix(output: Path) -> None:
    """Killed while it writes: whatever is left is a journal, or none at all."""
    with Journal(output, ABOUT) as journal:
        for chunk in range(5):
            journal.finish(chunk)
    whole = journal_file(output).read_bytes()
    for size in range(len(whole) + 1):
        journal_file(output).write_bytes(whole[:size])
        with Journal(output, ABOUT) as journal:
            n_done = len(journal.done)
            assert list(journal.done) == list(range(n_done))
            journal.finish(99)
        with Journal(output, ABOUT) as journal:
            assert list(journal.done) == [*range(n_done), 99]
    assert n_done == 5


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        b"\n", b"{}\n", b"[1]\n", b"my notes", b"GGUF\3\0\0\0", b"[" * 9999, b'{"run":"3"}\n',
        b'{"run":"marathon"}\n', b'{"run":"' * 999, b'{"run":"1f2e3d4c5b6a7988","time":3}\n',
    ],
)  # fmt: skip
def test_a_file_of_somebody_else_is_refused(output: Path, content: bytes, restart: bool) -> None:
    journal_file(output).write_bytes(content)
    with pytest.raises(OutputError, match=r"\.journal: is in the way, and is no journal of a run"):
        Journal(output, ABOUT, restart=restart)
    assert journal_file(output).read_bytes() == content


@pytest.mark.parametrize("junk", [b'{"ru', b"\x00" * 50, b'{"run":"1f2e3d4c5b6a7988","state of'])
def test_a_journal_that_was_damaged_is_begun_anew(output: Path, junk: bytes) -> None:
    journal_file(output).write_bytes(junk)
    with Journal(output, ABOUT) as journal:
        journal.finish(1)
    with Journal(output, ABOUT) as journal:
        assert journal.done == {1: 0}


def test_a_flipped_bit_ends_the_records(output: Path) -> None:
    with Journal(output, ABOUT) as journal:
        for chunk in range(5):
            journal.finish(chunk)
    data = bytearray(journal_file(output).read_bytes())
    data[-50] ^= 1  # in the third record from the end
    journal_file(output).write_bytes(data)
    with Journal(output, ABOUT) as journal:
        assert list(journal.done) == [0, 1]


def test_after_a_crash_of_the_machine_only_what_was_synced_counts(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reboot(monkeypatch, tmp_path)
    with Journal(output, ABOUT) as journal, open(tmp_path / "data", "wb") as data:
        journal.finish(0)
        journal.finish(1)
        journal.sync([data.fileno()])
        journal.finish(2)
    with Journal(output, ABOUT) as journal:
        assert list(journal.done) == [0, 1, 2]
    reboot(monkeypatch, tmp_path)
    with Journal(output, ABOUT) as journal:
        assert list(journal.done) == [0, 1]
        journal.finish(3)
    with Journal(output, ABOUT) as journal:  # a kill: the same start of the machine
        assert list(journal.done) == [0, 1, 3]
    reboot(monkeypatch, tmp_path)
    with Journal(output, ABOUT) as journal:
        assert list(journal.done) == [0, 1]


def test_after_a_failure_of_the_disk_only_what_was_synced_counts(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that could not write pages out may have dropped them, and then shows what is on the disk."""

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Journal(output, ABOUT) as journal, open(tmp_path / "data", "wb") as data:
        journal.finish(0)
        journal.sync([data.fileno()])
        journal.finish(1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(OutputError, match="the output can't be synced: Input/output error"):
                journal.sync([data.fileno()])
        assert list(journal.done) == [0]
        journal.finish(2)  # by another thread
    with Journal(output, ABOUT) as journal:
        assert list(journal.done) == [0]


def test_what_has_been_synced_is_known_on_the_disk_too(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: sizes.append(os.fstat(fd).st_size))
    with Journal(output, ABOUT) as journal:
        journal.finish(0)
        journal.sync([])
        journal.finish_output(0, inode=7)
        assert len(sizes) == 2
        assert sizes[1] == journal_file(output).stat().st_size


def test_a_journal_that_cannot_be_begun_leaves_nothing(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OutputError, match="journal: can't be written: No space left on device"):
            Journal(output, ABOUT)
        assert not journal_file(output).exists()
    with Journal(output, ABOUT) as journal:
        journal.finish(3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OutputError, match="No space left"):
            Journal(output, ABOUT)
    with Journal(output, ABOUT) as journal:
        assert journal.done == {3: 0}


def test_sync_is_due_once_in_a_while(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(output, ABOUT) as journal:
        assert not journal.is_sync_due()
        monkeypatch.setattr(module, "SYNC_SECONDS", 0.0)
        assert journal.is_sync_due()
        monkeypatch.setattr(module, "SYNC_SECONDS", 60.0)
        assert not journal.is_sync_due()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"nope/out\.gguf: there is no folder .*/nope; create it first"):
        Journal(tmp_path / "nope" / "out.gguf", ABOUT)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, ("a, b", [1, 2], [1, 3])),
        ({"a": 1}, {"a": 1, "c": 2}, ("c", None, 2)),
        ({"a": 1, "c": 2}, {"a": 1}, ("c", 2, None)),
        ({"a": {"b": 1}}, {"a": 1}, ("a", {"b": 1}, 1)),
    ],
)
def test_first_difference(old: object, new: object, found: object) -> None:
    assert first_difference(old, new) == found
