"""A run has one process at a time, and goes on only as what it was begun as."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_tools.errors import BadRequest, OutputError
from gguf_tools.files.run_lock import JSONDifference, Refusals, RunLock, in_use, lock_run

ABOUT = {"plan": {"a": "Q4_0"}, "size": (2, 3)}
REFUSALS = Refusals(
    unwritable=lambda reason: OutputError(f"unwritable: {reason}"),
    taken=lambda: BadRequest("taken"),
    another=lambda difference: BadRequest(f"another: {tuple(difference)}"),
)


def locked(path: Path) -> RunLock:
    return lock_run(path, ABOUT, REFUSALS)


def test_a_run_has_one_process_at_a_time(tmp_path: Path) -> None:
    first = locked(tmp_path / "lock")
    with pytest.raises(BadRequest, match=r"^taken$"):
        locked(tmp_path / "lock")
    first.close()
    first.close()
    locked(tmp_path / "lock").close()


def test_a_file_that_was_removed_before_it_was_locked_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one is; whoever goes on removing it has it."""
    path, n_removed = tmp_path / "lock", 0
    lock: Callable[[int, int], None] = fcntl.flock

    def remove_first(fd: int, how: int) -> None:
        nonlocal n_removed
        if n_removed < n_removals:
            path.unlink()
            n_removed += 1
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    n_removals = 1
    locked(path).close()
    n_removals = 10**6
    with pytest.raises(BadRequest, match=r"^taken$"):
        locked(path)


def test_a_folder_that_was_removed_before_it_was_looked_at_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Path.mkdir` says that it exists where it does no more; `clean` may have had it."""
    made, folder = Path.mkdir, tmp_path / "work"
    calls = 0

    def late(self: Path, *args: object, **given: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise FileExistsError(17, "File exists", str(self))
        made(self, *args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", late)
    with in_use(folder):
        assert folder.is_dir()
    assert (calls, folder.exists()) == (2, False)


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "work").touch()
    with (
        pytest.raises(OutputError, match=r"work: can't be written \(File exists\)$"),
        in_use(tmp_path / "work"),
    ):
        pass


def test_what_cannot_be_created_says_why(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"^unwritable: No such file or directory$"):
        locked(tmp_path / "missing" / "lock")


def test_another_run_is_refused(tmp_path: Path) -> None:
    mine = locked(tmp_path / "lock")
    mine.refuse_another({"plan": {"a": "Q4_0"}, "size": [2, 3]})
    with pytest.raises(BadRequest, match=r"^another: \('plan, a', 'Q8_0', 'Q4_0'\)$"):
        mine.refuse_another({"plan": {"a": "Q8_0"}, "size": [2, 3]})
    with pytest.raises(BadRequest) as refused:
        mine.refuse_another({})
    assert str(refused.value) == f"another: {tuple(JSONDifference('plan', None, {'a': 'Q4_0'}))}"
    mine.close()


def test_large_numbers_are_texts_and_those_of_earlier_versions_are_known(tmp_path: Path) -> None:
    """A time in nanoseconds is beyond what JavaScript tells apart."""
    time_ns = 1_790_000_000_123_456_789
    run_lock = lock_run(tmp_path / "lock", {"files": [["a", 5, time_ns]]}, REFUSALS)
    assert run_lock.about == {"files": [["a", 5, str(time_ns)]]}
    run_lock.refuse_another({"files": [["a", 5, time_ns]]})
    run_lock.refuse_another(run_lock.about)
    with pytest.raises(BadRequest, match="another"):
        run_lock.refuse_another({"files": [["a", 5, time_ns + 1]]})
    run_lock.close()
