"""Work folders that are somebody else's, or hold somebody else's files: nothing of theirs is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gguf_tools.errors import BadRequest, OutputError  # noqa: E402
from gguf_tools.files.leftovers import forget  # noqa: E402
from gguf_tools.files.owned_folder import work_path  # noqa: E402
from imatrix.evaluate.bases.cached_states import KeptFolder  # noqa: E402
from imatrix.forward.hidden_states import FileStates  # noqa: E402
from imatrix.forward.work_folder import EMBEDDING, WorkFolder  # noqa: E402

ABOUT = {"model": "m"}
SUMS = {"sums": np.arange(3.0)}


def begin(output: Path) -> Path:
    """Leave what a run has left that was killed after its first layer; return its folder."""
    with WorkFolder(output, ABOUT) as work:
        for layer in (EMBEDDING, 0):
            path = work.hidden_path(layer)
            path.write_bytes(bytes([layer + 2]) * 64)
            work.finish_layer(layer, SUMS if layer == 0 else {}, [path])
    return output.with_name(output.name + ".work")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def work_folder(folder: Path, *, restart: bool) -> None:
    with WorkFolder(folder.with_suffix(""), ABOUT, restart=restart):
        pass


def kept_folder(folder: Path, *, restart: bool) -> None:
    KeptFolder(folder, restart=restart).close()


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("name", ["mine.txt", "run.json", "about.json", "hidden.0", "output", "record"])
@pytest.mark.parametrize("opened", [work_folder, kept_folder])
def test_a_folder_without_our_mark_is_refused(
    opened: Callable[..., None], name: str, restart: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "out.work"
    folder.mkdir()
    (folder / name).write_bytes(b'{"version": 1}\n')
    with pytest.raises(BadRequest, match=rf"out\.work: holds '{name}' and was not made by this command"):
        opened(folder, restart=restart)
    forget(work_path(tmp_path / "out"))
    assert contents(folder) == {name: b'{"version": 1}\n'}


@pytest.mark.parametrize("restart", [False, True])
def test_strangers_files_in_our_folder_stay(restart: bool, tmp_path: Path) -> None:
    folder = begin(tmp_path / "out")
    (folder / "notes.txt").write_text("mine")
    (folder / "hidden.1.old").mkdir()
    with WorkFolder(tmp_path / "out", ABOUT, restart=restart) as work:
        assert work.done == (EMBEDDING - 1 if restart else 0)
    forget(work_path(tmp_path / "out"))
    assert sorted(path.name for path in folder.iterdir()) == ["hidden.1.old", "notes.txt"]
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_finished_run_leaves_nothing(tmp_path: Path) -> None:
    begin(tmp_path / "out")
    forget(work_path(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_run_has_begun_is_not_removed(tmp_path: Path) -> None:
    folder = begin(tmp_path / "out")
    before = contents(folder)
    with WorkFolder(tmp_path / "out", ABOUT):
        forget(work_path(tmp_path / "out"))
    assert contents(folder) == before


LINKS = {"symbolic": os.symlink, "hard": os.link}


@pytest.mark.parametrize("name", ["hidden.0", "hidden.1", "sums.00000.npz", "run.json", "record"])
@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("restart", [False, True])
def test_nothing_is_written_through_a_link(restart: bool, kind: str, name: str, tmp_path: Path) -> None:
    folder = begin(tmp_path / "out")
    target = tmp_path / "precious"
    target.write_bytes((folder / name).read_bytes())
    before = target.read_bytes()
    (folder / name).unlink()
    LINKS[kind](target, folder / name)
    with nullcontext() if restart else pytest.raises(OutputError, match=f"{name}: can't be written"):
        begin_again(tmp_path / "out", restart=restart)
    assert ((folder / name).is_symlink() or (folder / name).stat().st_nlink == 2) != restart
    assert target.read_bytes() == before


def begin_again(output: Path, *, restart: bool) -> None:
    with WorkFolder(output, ABOUT, restart=restart) as work:
        for layer in range(work.done + 1, 2):
            states = FileStates(work.hidden_path(layer), 4, 4)
            states.write(0, torch.ones(4, 4))
            states.close()
            work.finish_layer(layer, SUMS, [states.path])


@pytest.mark.parametrize("kind", LINKS)
def test_scratch_is_not_written_through_a_link(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"of somebody else")
    LINKS[kind](target, tmp_path / "middle")
    with pytest.raises(OutputError, match=r"middle: can't be written \(it is a link to a file"):
        FileStates(tmp_path / "middle", 2, 2)
    assert target.read_bytes() == b"of somebody else"


def test_an_output_that_is_a_folder_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="out: is a folder, expected a file to write"):
        WorkFolder(tmp_path / "out", ABOUT)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
