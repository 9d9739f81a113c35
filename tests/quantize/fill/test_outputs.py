"""Outputs of a run that is killed, at every call of the system, again and again; and of one that fails."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from gguf_tools.errors import ExecutionError, OutputError
from gguf_tools.files.journal import Journal
from gguf_tools.format.ggml_types import F32, Q8_0, GGMLType
from gguf_tools.format.shards import open_gguf
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from gguf_tools.progress import NO_REPORT, Advance
from gguf_tools.system import locks
from quantize.fill.encode import RowSources
from quantize.fill.filling import FillJob
from quantize.fill.outputs import Written, write_outputs
from quantize.fill.session import Session
from quantize.prepare import lay_out
from quantize.run_options import RunOptions
from tests.support.killing import OLD, Mode, WatchedOutputs, killed_at, without_syncs  # noqa: F401

N_PARTS = 3


@dataclass(frozen=True)
class Rows:
    """A source tensor of random rows, the same each time."""

    name: str
    shape: tuple[int, ...]
    seed: int
    type: GGMLType = F32
    by_rows: ClassVar[bool] = True

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        return rng.standard_normal((self.shape[0] * self.shape[1], self.shape[2]), np.float32)[start:stop]

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        return self.read_rows(start, stop).reshape(-1).view(np.uint8)


SOURCES = {
    f"blk.{i}.ffn_up_exps.weight": Rows(f"blk.{i}.ffn_up_exps.weight", (3, 2, 64), i) for i in range(4)
}
ROWS = RowSources(SOURCES, {})
N_CHUNKS = 3 * len(SOURCES)


def run(
    folder: Path,
    n_parts: int = N_PARTS,
    *,
    sources: RowSources = ROWS,
    n_threads: int = 1,
    inputs: Sequence[Path] = (),
    restart: bool = False,
    progress: Advance = NO_REPORT.advance,
) -> Written:
    """Write the output out.gguf, or its parts, in `folder`."""
    infos = [
        TensorInfo(name, rows.shape, Q8_0 if i % 2 else F32) for i, (name, rows) in enumerate(SOURCES.items())
    ]
    groups = [infos] if n_parts == 1 else [infos[:2], infos[2:3], infos[3:]]
    outputs = lay_out(folder / "out.gguf", {"general.name": Value.string("x" * 100)}, groups)
    job = FillJob(outputs, sources, tuple(inputs))
    return write_outputs([job], RunOptions(n_threads, restart), progress)[0]


def warm_up() -> None:
    """Load what a run needs into the process that forks children."""
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, bytes]]:
    """What an undisturbed run writes, by the number of parts."""
    found = {}
    for n_parts in (1, N_PARTS):
        folder = tmp_path_factory.mktemp("expected")
        run(folder, n_parts)
        found[n_parts] = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert len(found[n_parts]) == n_parts
    return found


def test_what_is_written_begins_its_way_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def watch(fd: int, offset: int, n_bytes: int, advice: int) -> None:
        begun.append((offset, offset + n_bytes))
        advise(fd, offset, n_bytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", watch)
    run(tmp_path, 1)
    with open_gguf(tmp_path / "out.gguf") as file:
        wanted = {file.shards[0].data_offset(name): info.n_bytes for name, info in file.tensors.items()}
    assert len(begun) == N_CHUNKS
    for start, n_bytes in wanted.items():
        assert sum(stop - begin for begin, stop in begun if start <= begin < start + n_bytes) == n_bytes


class Trial(WatchedOutputs):
    """A folder in which runs are killed."""

    def work(self) -> None:
        run(self.folder, len(self.wanted))

    def kill(self, n: int, mode: Mode) -> bool:
        """Start a run and kill it at its call number `n`; return False if it was done before that."""
        with self.watched():
            return killed_at(n, self.work, mode)

    def finish(self) -> None:
        """Let a run end."""
        with self.watched():
            assert not killed_at(None, self.work)
        self.check_all_are_there()


@pytest.mark.parametrize(
    ("n_parts", "mode"),
    [
        (1, "before"),
        (1, "torn"),
        *(pytest.param(N_PARTS, mode, marks=pytest.mark.slow) for mode in ("before", "torn")),
    ],
)
def test_killed_at_any_call_the_next_run_ends_it(
    expected: dict[int, dict[str, bytes]], tmp_path: Path, n_parts: int, mode: Mode
) -> None:
    for n in itertools.count():
        trial = Trial(tmp_path / str(n), expected[n_parts])
        if not trial.kill(n, mode):
            break
        trial.finish()
        shutil.rmtree(trial.folder)
    assert n > 20 * n_parts


def test_a_partial_that_was_removed_is_not_missed_later(
    expected: dict[int, dict[str, bytes]], tmp_path: Path
) -> None:
    """Its chunks are done in the journal. The next run begins another partial, and may be killed too."""
    for n in itertools.count():
        trial = Trial(tmp_path / str(n), expected[1])
        assert trial.kill(20, "before")
        (trial.folder / "out.gguf.partial").unlink()
        again = trial.kill(n, "before")
        trial.finish()
        if not again:
            break


def test_a_partial_that_is_not_this_run_s_is_not_taken_over(
    expected: dict[int, dict[str, bytes]], tmp_path: Path
) -> None:
    """Of the right size, with the right header, and wrong data: at every state of the journal."""
    (data,) = expected[1].values()
    for n in itertools.count():
        trial = Trial(tmp_path / str(n), expected[1])
        again = trial.kill(n, "before")
        partial = trial.folder / "out.gguf.partial"
        if partial.exists():
            stranger = tmp_path / "stranger"
            stranger.write_bytes(data[:-100] + bytes(100))
            stranger.rename(partial)
        trial.finish()
        if not again:
            break


@pytest.mark.parametrize("n_written", [1, 12, 20, 23])
def test_a_header_that_a_kill_has_cut_is_ours(
    expected: dict[int, dict[str, bytes]], tmp_path: Path, n_written: int
) -> None:
    """Its first bytes stand in place of the mark's, and the journal has gone."""
    (data,) = expected[1].values()
    mark = b"gguf-tools PART\n12345678"
    (tmp_path / "out.gguf.partial").write_bytes(data[:n_written] + mark[n_written:] + data[len(mark) :])
    run(tmp_path, 1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == expected[1]


def kill_again_and_again(
    expected: dict[int, dict[str, bytes]], tmp_path: Path, n_trials: int, seed: int
) -> None:
    """Kill runs at random calls; between them, sometimes, take something away."""
    rng = random.Random(seed)
    for number in range(n_trials):
        n_parts = rng.choice((1, N_PARTS))
        trial = Trial(tmp_path / str(number), expected[n_parts])
        for _ in range(rng.randint(2, 5)):
            trial.kill(rng.randrange(30 * n_parts), rng.choice(("before", "torn")))
            leftovers = trial.leftovers()
            if leftovers and rng.random() < 0.4:
                rng.choice(leftovers).unlink()
        trial.finish()
        shutil.rmtree(trial.folder)


@pytest.mark.slow
def test_killed_again_and_again(expected: dict[int, dict[str, bytes]], tmp_path: Path) -> None:
    kill_again_and_again(expected, tmp_path, 60, seed=1)


@pytest.mark.slow
def test_killed_again_and_again_at_length(expected: dict[int, dict[str, bytes]], tmp_path: Path) -> None:
    kill_again_and_again(expected, tmp_path, 2000, seed=2)


# ---- a crash of the machine: what was not synced may be anything


class Cache:
    """What has been written since it was last synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unsynced: dict[str, list[tuple[int, int]]] = {}
        pwrite = os.pwrite

        def write(fd: int, data: memoryview, offset: int) -> int:
            self.unsynced.setdefault(_path_of(fd), []).append((offset, len(data)))
            return pwrite(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", write)
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, lambda fd: self.unsynced.pop(_path_of(fd), None))

    def lose(self) -> None:
        for path, ranges in self.unsynced.items():
            for offset, n_bytes in ranges:
                if os.path.exists(path):
                    with open(path, "r+b") as file:
                        file.seek(offset)
                        file.write(b"\xa5" * n_bytes)
        self.unsynced.clear()


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


@dataclass(frozen=True)
class Failing(Rows):
    """A source tensor whose rows can't be read any more from one on."""

    first_bad: int = 0

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        if stop > self.first_bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_rows(start, stop)


def failing_at(chunk: int) -> RowSources:
    """Make sources that are ROWS up to chunk number `chunk`."""
    rows = list(SOURCES.values())[chunk // 3]
    bad = Failing(rows.name, rows.shape, rows.seed, first_bad=2 * (chunk % 3))
    return RowSources({**SOURCES, rows.name: bad}, {})


@pytest.mark.parametrize("n_parts", [1, N_PARTS])
@pytest.mark.parametrize("last_synced", [0, 1, 4])
def test_after_a_crash_of_the_machine_what_was_not_synced_is_done_again(
    expected: dict[int, dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    n_parts: int,
    last_synced: int,
) -> None:
    cache = Cache(monkeypatch)
    n_asked = 0

    def is_sync_due(journal: Journal) -> bool:
        nonlocal n_asked
        n_asked += 1
        return n_asked == last_synced

    monkeypatch.setattr(Journal, "is_sync_due", is_sync_due)
    for chunk in range(1, N_CHUNKS):
        folder = tmp_path / str(chunk)
        folder.mkdir()
        boot = tmp_path / "boot_id"
        boot.write_text(f"{chunk}, first")
        monkeypatch.setattr(locks, "_BOOT_ID", boot)
        n_asked = 0
        with monkeypatch.context() as crash:
            crash.setattr(Session, "keep", lambda *_: None)  # a session that ends in order syncs
            with pytest.raises(ExecutionError, match="Input/output error"):
                run(folder, n_parts, sources=failing_at(chunk))
        cache.lose()
        boot.write_text(f"{chunk}, second")
        written = run(folder, n_parts)
        n_published = sum(chunk >= stop for stop in ((6, 9) if n_parts > 1 else ()))
        n_synced = max(last_synced if last_synced <= chunk else 0, (0, 6, 9)[n_published])
        assert written == Written(N_CHUNKS, n_synced)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected[n_parts]


def test_a_session_that_ends_in_order_keeps_all_that_is_done(
    expected: dict[int, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, boot, folder = Cache(monkeypatch), tmp_path / "boot_id", tmp_path / "out"
    folder.mkdir()
    boot.write_text("first")
    monkeypatch.setattr(locks, "_BOOT_ID", boot)
    with pytest.raises(ExecutionError, match="Input/output error") as caught:
        run(folder, sources=failing_at(4))
    assert caught.value.__notes__ == [
        f"4 of {N_CHUNKS} chunks are done and kept: the same command resumes from there"
    ]
    cache.lose()
    boot.write_text("second")
    assert run(folder) == Written(N_CHUNKS, 4)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected[N_PARTS]


def test_what_a_failing_disk_may_have_lost_is_done_again(
    expected: dict[int, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(monkeypatch)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(ExecutionError, match="the output can't be synced: Input/output error"):
            run(tmp_path, 1)
    cache.lose()
    assert run(tmp_path, 1) == Written(N_CHUNKS, 0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == expected[1]


# ---- failures that are told, and gone on from


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_chunk_that_fails_keeps_the_others(
    expected: dict[int, dict[str, bytes]], tmp_path: Path, n_threads: int
) -> None:
    with pytest.raises(ExecutionError, match=r"blk\.2\.ffn_up_exps\.weight rows 2\.\.4: OSError") as caught:
        run(tmp_path, 1, sources=failing_at(7), n_threads=n_threads)
    (note,) = caught.value.__notes__
    n_done = int(note.split()[0])
    assert n_done == 7 if n_threads == 1 else 6 <= n_done <= 8
    assert run(tmp_path, 1, n_threads=3 - n_threads) == Written(N_CHUNKS, n_done)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == expected[1]


def test_a_run_that_has_done_nothing_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "out.gguf").write_bytes(OLD)
    with pytest.raises(ExecutionError) as caught:
        run(tmp_path, 1, sources=failing_at(0))
    assert not hasattr(caught.value, "__notes__")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"out.gguf": OLD}


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("n_parts", [1, N_PARTS])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_a_run_can_be_cancelled_from_its_progress(
    expected: dict[int, dict[str, bytes]],
    tmp_path: Path,
    kind: type[BaseException],
    n_parts: int,
    n_threads: int,
) -> None:
    error = kind()
    told: list[int] = []

    def progress(n_bytes: int) -> None:
        told.append(n_bytes)
        if len(told) == 7:
            raise error

    with pytest.raises(kind) as caught:
        run(tmp_path, n_parts, n_threads=n_threads, progress=progress)
    assert caught.value is error
    (note,) = error.__notes__
    n_done = int(note.split()[0])
    assert note == f"{n_done} of {N_CHUNKS} chunks are done and kept: the same command resumes from there"
    assert n_done == 7 if n_threads == 1 else 7 <= n_done <= 8
    assert run(tmp_path, n_parts) == Written(N_CHUNKS, n_done)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == expected[n_parts]


@pytest.mark.parametrize("n_done", [2, 7, 10])
def test_progress_counts_what_was_done_before(tmp_path: Path, n_done: int) -> None:
    def told(folder: Path, *tries: RowSources) -> int:
        """Return how many bytes the last run says it has."""
        n_bytes: list[int] = []
        for sources in tries:
            n_bytes.clear()
            with contextlib.suppress(ExecutionError):
                run(folder, sources=sources, progress=n_bytes.append)
        return sum(n_bytes)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert told(tmp_path / "a", failing_at(n_done), ROWS) == told(tmp_path / "b", ROWS)


def test_restart_begins_anew(expected: dict[int, dict[str, bytes]], tmp_path: Path) -> None:
    trial = Trial(tmp_path / "trial", expected[N_PARTS])
    assert trial.kill(35, "before")
    assert run(trial.folder, restart=True) == Written(N_CHUNKS, 0)
    assert {path.name: path.read_bytes() for path in trial.folder.iterdir()} == expected[N_PARTS]


def test_a_second_run_is_refused_and_the_first_is_undisturbed(
    expected: dict[int, dict[str, bytes]], tmp_path: Path
) -> None:
    refused: list[OutputError] = []

    @dataclass(frozen=True)
    class Meanwhile(Rows):
        def read_rows(self, start: int, stop: int) -> np.ndarray:
            for restart in (False, True):
                with pytest.raises(OutputError, match="another process is writing this output") as caught:
                    run(tmp_path, N_PARTS, restart=restart)
                refused.append(caught.value)
            return super().read_rows(start, stop)

    sources = {name: Meanwhile(rows.name, rows.shape, rows.seed) for name, rows in SOURCES.items()}
    assert run(tmp_path, N_PARTS, sources=RowSources(sources, {})) == Written(N_CHUNKS, 0)
    assert len(refused) == 2 * N_CHUNKS
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == expected[N_PARTS]


def test_an_input_is_not_taken_for_a_journal(tmp_path: Path) -> None:
    model = tmp_path / "out.gguf.journal"
    model.write_bytes(OLD)
    with pytest.raises(OutputError, match=r"out\.gguf\.journal: is an input of this run"):
        run(tmp_path, 1, inputs=[model])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {model.name: OLD}
