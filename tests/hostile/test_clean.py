"""`clean --remove` beside runs, links and strangers' files: only what is ours and nobody's any more goes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gguf_tools
from gguf_tools.cluster.job import job_path, remove_job
from gguf_tools.errors import OutputError, ToolkitError
from gguf_tools.files import leftovers, named_files
from gguf_tools.files.early_checks import refuse_to_replace
from gguf_tools.files.journal import Journal
from gguf_tools.files.leftovers import forget
from gguf_tools.files.named_files import small_partial, whole_file, write_whole
from gguf_tools.files.owned_folder import work_path
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.files.run_lock import in_use
from gguf_tools.system import locks
from gguf_tools.system.locks import try_lock
from tests.gguf_tools.test_writer import LAYOUT
from tests.support.trained_model import EXAMPLE

ROOT = Path(__file__).parents[2]
MARK = '{"made by gguf-tools": "work", "version": 3}'
JOURNAL = '{"run":"%s","state of the inputs":"0123456789abcdef","journal":1}\n'


def work(folder: Path) -> Path:
    """Leave a work folder of a run that was killed."""
    folder.mkdir(parents=True)
    (folder / "hidden.0").write_bytes(bytes(100))
    (folder / "lock").touch()
    (folder / "run.json").write_text(MARK)
    return folder


def run_of(output: Path, others: tuple[str, ...] = (), run: str = "1f2e3d4c5b6a7988") -> list[Path]:
    """Leave all that a run can leave of an output, and partials of its other outputs."""
    folder, name = output.parent, output.name
    made = [folder / f"{name}.journal", folder / f"{name}.job", folder / small_partial(name)]
    made[0].write_text(JOURNAL % run)
    made[1].write_bytes(b"GGUFJOB\0...")
    made[2].write_text("half of a small file")
    for each in (name, *others):
        made.append(folder / f"{each}.partial")
        made[-1].write_bytes(b"gguf-tools PART\n" + bytes.fromhex(run) + bytes(100))
    return [*made, work(folder / f"{name}.work")]


def tree(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def clean(place: Path) -> tuple[set[str], set[str]]:
    """Return what `clean --remove` names as removed, and as in use."""
    found = list(leftovers.leftovers(place, remove=True))
    return {each.path.name for each in found if not each.is_held}, {
        each.path.name for each in found if each.is_held
    }


def test_all_of_a_run_goes(tmp_path: Path) -> None:
    made = run_of(tmp_path / "a.gguf", ("b.gguf",))
    (tmp_path / "a.gguf").write_text("finished")
    work(tmp_path / "e" / "base.work")
    work(tmp_path / "c.work" / "backward.work")
    (tmp_path / "c.work" / "lock").write_text('{"made by gguf-tools": "lock"}\n')
    assert clean(tmp_path) == ({*(path.name for path in made), "base.work", "c.work"}, set())
    assert tree(tmp_path) == {"a.gguf", "e"}
    assert clean(tmp_path) == (set(), set())


@pytest.mark.parametrize("held", range(7))
def test_a_run_is_in_use_by_any_of_its_locks(held: int, tmp_path: Path) -> None:
    """The lock of a part, of a journal, of a partial: it is one run."""
    made = run_of(tmp_path / "a.gguf", ("b.gguf",))
    part = work(made[-1] / "backward.work")
    before = tree(tmp_path)
    locks = [made[0], *made[2:-1], made[-1] / "lock", part / "lock"]
    with open(locks[held % len(locks)], "rb+") as file:
        try_lock(file.fileno())
        assert clean(tmp_path) == (set(), {path.name for path in made})
        assert clean(tmp_path / "b.gguf")[0] == set()
    assert tree(tmp_path) == before


def test_a_folder_in_which_cook_works_is_in_use(tmp_path: Path) -> None:
    made = run_of(tmp_path / "a.gguf")
    work(tmp_path / ".cook" / "evaluation" / "base.work")
    work(tmp_path / ".cook" / "evaluation.work")
    (tmp_path / ".cook" / "lock").touch()
    with open(tmp_path / ".cook" / "lock", "rb+") as file:
        try_lock(file.fileno())
        assert clean(tmp_path)[1] == {*(path.name for path in made), "evaluation.work"}
    assert len(clean(tmp_path)[0]) == len(made) + 1


STRANGERS = {
    "film.mkv.deadbeef.partial": b"another program's download",
    "model.gguf.1f2e3d4c5b6a798800112233.partial": b"with as many digits as ours",
    "talk.partial": b"PARTS of a talk",
    "part.partial": b"PART" + bytes(200),
    "diary.journal": b'{"run":"marathon","journal":"mine"}\n',
    "short.journal": b'{"run":"1f2e3d4c5b6a7988"}\n',
    "x.job": b"GGUFJOB",
    "y.work/lock": b"",
    "z.work/run.json": b'{"version": 3}',
    "z.work/hidden.0": b"mine",
    "w.work/record": b'{"made by": "me"}\n',
}


def test_what_has_less_than_our_whole_mark_stays(tmp_path: Path) -> None:
    for name, data in STRANGERS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "pipe.partial").parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "pipe.partial")
    ours = work(tmp_path / "ours.work")
    (ours / "notes.txt").write_text("mine")
    before = tree(tmp_path)
    assert clean(tmp_path) == ({"ours.work"}, set())
    assert tree(tmp_path) == before - {f"ours.work/{name}" for name in ("run.json", "hidden.0", "lock")}
    for name, data in STRANGERS.items():
        assert (tmp_path / name).read_bytes() == data
    write_beside(tmp_path / "model.gguf")
    write_beside(tmp_path / "film.mkv")
    assert all((tmp_path / name).exists() for name in STRANGERS)


def write_beside(path: Path) -> None:
    with whole_file(path) as file:
        file.write(b"x")


def test_no_step_is_a_link(tmp_path: Path) -> None:
    """A work folder, a part, a parent, a file: what a link leads to stays, in the folder and outside."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    precious = work(other / "x.work")
    run_of(other / "a.gguf")
    ours = work(mine / "x.work")
    (mine / "link.work").symlink_to(precious)
    (mine / "folder").symlink_to(other)
    (ours / "base.work").symlink_to(precious)
    for path in (other / "a.gguf.partial", other / "a.gguf.journal"):
        (mine / path.name).symlink_to(path)
        (mine / f"hard.{path.name}").hardlink_to(path)
    (mine / "b.gguf.partial").symlink_to(mine / "nowhere")
    (ours / "middle").symlink_to(precious / "hidden.0")
    before = tree(other)
    assert clean(mine) == ({"x.work"}, set())
    assert tree(other) == before
    assert {"x.work/base.work", "x.work/middle", "link.work", "folder"} <= tree(mine)
    assert "x.work/hidden.0" not in tree(mine)


@pytest.mark.parametrize("step", ["inner", "inner/x.work", "inner/x.work/base.work"])
def test_a_link_that_is_swapped_in_is_not_followed(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking and removing, a folder becomes a link to another with the same names."""
    for name in ("mine", "other"):
        work(work(tmp_path / name / "inner" / "x.work") / "base.work")
    before = tree(tmp_path / "other")

    def swap(*args: object) -> bool:
        target = tmp_path / "mine" / step
        if not target.is_symlink():
            target.rename(tmp_path / "moved")
            target.symlink_to(tmp_path / "other" / step)
        return True

    share = leftovers._Locks.share_run

    def share_and_swap(self: leftovers._Locks, *args: object, **more: bool) -> bool:
        return share(self, *args, **more) and swap()  # type: ignore[arg-type]

    monkeypatch.setattr(leftovers._Locks, "share_run", share_and_swap)
    list(leftovers.leftovers(tmp_path / "mine", remove=True))
    assert tree(tmp_path / "other") == before


def test_the_end_of_a_run_steps_through_no_link(tmp_path: Path) -> None:
    precious = work(tmp_path / "other" / "x.work")
    ours = work(tmp_path / "x.work")
    (ours / "base.work").symlink_to(precious)
    before = tree(precious)
    forget(ours)
    assert tree(precious) == before
    assert tree(ours) == {"base.work"}


@contextmanager
def cleaning(place: Path) -> Iterator[list[BaseException]]:
    """Clean a folder again and again, in another thread."""
    stop, errors = threading.Event(), list[BaseException]()

    def loop() -> None:
        while not stop.is_set():
            try:
                list(leftovers.leftovers(place, remove=True))
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield errors
    finally:
        stop.set()
        thread.join()
    assert errors == [], errors


def run_once(output: Path, *, is_killed: bool) -> None:
    """Begin a run as commands do, over what an earlier one has left, and end it."""
    folder = output.with_name(output.name + ".work")
    with in_use(folder), Journal(output, {"a": 1}) as journal:
        (folder / "run.json").write_text(MARK)
        write_whole(job_path(output), b"GGUFJOB\0...")
        with GGUFWriter(output, LAYOUT, run=journal.run, found=journal.found) as writer:
            writer.mark()
            journal.finish(0)
            time.sleep(0.002)
            there = {journal.path, writer.partial, job_path(output), folder / "run.json", folder / "lock"}
            assert all(path.exists() for path in there)
            if is_killed:
                return
            writer.publish()
        remove_job(output)
        journal.remove()
        forget(folder)


def test_runs_that_begin_and_end_beside_a_clean(tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    with cleaning(tmp_path):
        for number in range(24):
            run_once(output, is_killed=number % 2 == 0)
    list(leftovers.leftovers(tmp_path, remove=True))
    assert tree(tmp_path) == {"out.gguf"}


def test_a_journal_that_is_gone_meanwhile_is_not_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run removes its journal after it was seen, and still holds its work folder."""
    names = [path.name for path in run_of(tmp_path / "x.gguf")]
    (tmp_path / "x.gguf.journal").unlink()
    monkeypatch.setattr(leftovers, "_runs", lambda folder: [{name: name.endswith(".work") for name in names}])
    before = tree(tmp_path)
    with in_use(tmp_path / "x.gguf.work"):
        list(leftovers.leftovers(tmp_path / "x.gguf", remove=True))
    assert tree(tmp_path) == before


@pytest.mark.slow
def test_a_command_beside_a_clean(tmp_path: Path) -> None:
    with cleaning(tmp_path):
        for type_ in ("Q8_0", "Q4_0"):
            gguf_tools.quantize(EXAMPLE, tmp_path / "out.gguf", type_, force=True)
    assert tree(tmp_path) == {"out.gguf"}


def test_a_run_waits_for_a_clean_and_not_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(tmp_path / "out.gguf")
    with open(tmp_path / "out.gguf.work" / "lock", "rb+") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        timer = threading.Timer(0.1, fcntl.flock, (other, fcntl.LOCK_UN))
        timer.start()
        with in_use(tmp_path / "out.gguf.work"):
            timer.join()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ToolkitError, match=r"out\.gguf\.work: another run is writing this output"):
            in_use(tmp_path / "out.gguf.work").__enter__()
        fcntl.flock(other, fcntl.LOCK_SH)
        monkeypatch.setattr(locks, "_SECONDS_TO_CLEAN", 0.05)
        with pytest.raises(ToolkitError, match="another run is writing this output"):
            in_use(tmp_path / "out.gguf.work").__enter__()


def test_a_stranger_s_work_folder_is_no_reason_to_replace_an_output(tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    output.write_text("precious")
    (tmp_path / "out.gguf.work").mkdir()
    (tmp_path / "out.gguf.work" / "mine.txt").write_text("mine")
    (tmp_path / "out.gguf.journal").write_text("a diary")
    with pytest.raises(ToolkitError, match=r"out\.gguf: exists already"):
        gguf_tools.quantize(EXAMPLE, output, "Q8_0")


LOADED = """
import sys
from gguf_tools.commands.main import main
assert main(["clean", sys.argv[1], "--remove"]) == 0
print(sorted({"numba", "torch", "llvmlite"} & {*sys.modules}))
"""


def test_it_loads_neither_kernels_nor_torch(tmp_path: Path) -> None:
    run_of(tmp_path / "a.gguf")
    command = [sys.executable, "-c", LOADED, str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("place", ["out.gguf.work", "folder"])
def test_a_work_folder_that_is_named_itself(place: str, tmp_path: Path) -> None:
    folder = work(tmp_path / place)
    (tmp_path / f"{place}.txt").write_text("mine")
    assert clean(folder) == ({place}, set())
    assert tree(tmp_path) == {f"{place}.txt"}


def test_a_small_output_whose_lock_is_looked_at_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def first_is_taken(fd: int) -> None:
        tried.append(fd)
        if len(tried) == 1:
            raise BlockingIOError(errno.EAGAIN, "looked at")

    monkeypatch.setattr(named_files, "try_lock", first_is_taken)
    write_whole(tmp_path / "out", b"all")
    assert (len(tried), [each.name for each in tmp_path.iterdir()]) == (2, ["out"])


def test_the_lock_of_a_run_that_was_killed_at_its_end_goes_with_the_refusal(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_bytes(b"all")
    with in_use(work_path(output)):
        shutil.copytree(work_path(output), tmp_path / "left")
    (tmp_path / "left").rename(work_path(output))
    with pytest.raises(OutputError, match="exists already"):
        refuse_to_replace([output], force=False)
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
