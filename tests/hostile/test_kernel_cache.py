"""Compiled kernels are kept where that is safe, compiled again where damaged, and never stop a run."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from gguf_tools.choices import speaking_flags
from quantize.simd import kernel as kernels

SOURCE = """
import numpy as np
from quantize.simd.kernel import kernel

@kernel
def double(rows: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(rows)):
        out[i] = 2 * rows[i]
"""


class Place:
    """A module with a kernel, and the folders in which a user may write."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.temporary, self.home = folder / "tmp", folder / "home"
        self.source = folder / "site" / "small_kernel.py"
        for path in (self.source.parent, self.temporary, self.home):
            path.mkdir()
        self.source.write_text(SOURCE)
        patch.setenv("HOME", str(self.home))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.setattr(tempfile, "tempdir", str(self.temporary))
        patch.setattr(numba.config, "CACHE_DIR", "")
        self._patch, self._capsys = patch, capsys

    def name(self, folder: Path) -> None:
        self._patch.setattr(numba.config, "CACHE_DIR", str(folder))

    def run(self) -> tuple[int, str, str]:
        """Call the kernel as a new process does: return cache hits, the place, and what is said."""
        kernels._told.clear()
        spec = importlib.util.spec_from_file_location("small_kernel", self.source)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        out = np.empty(3)
        with speaking_flags():
            module.double(np.arange(3.0), out)
        assert out.tolist() == [0, 2, 4]
        n_hits = sum(module.double.stats.cache_hits.values())
        return n_hits, str(module.double._cache.cache_path), self._capsys.readouterr().err

    def close_source(self) -> None:
        """Have a file where __pycache__ would be, as root can write to every folder."""
        (self.source.parent / "__pycache__").write_text("")

    def close_home(self) -> None:
        shutil.rmtree(self.home)
        self.home.write_text("")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, monkeypatch, capsys)


def test_the_usual_place(place: Place) -> None:
    hits, where, said = place.run()
    assert (hits, Path(where), said) == (0, place.source.parent / "__pycache__", "")
    assert place.run() == (1, where, "")


def test_without_a_home_kernels_are_kept_among_temporary_files(place: Place) -> None:
    place.close_source()
    assert place.run()[1].startswith(f"{place.home}/")
    place.close_home()
    hits, where, said = place.run()
    assert hits == 0
    assert where.startswith(f"{place.temporary}/gguf-tools-kernels-")
    assert said.startswith("note: no other place can be written: compiled kernels are kept in ")
    assert said.count("\n") == 1
    assert Path(where).parent.stat().st_mode & 0o077 == 0
    assert place.run() == (1, where, "")


def other_owner(path: Path) -> None:
    path.mkdir()
    os.chown(path, 65534, 65534)


TAKEN: list[Callable[[Path], object]] = [
    lambda path: path.write_text(""),
    lambda path: path.symlink_to("/tmp"),
    lambda path: (path.mkdir(), path.chmod(0o777)),
    pytest.param(other_owner, marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),  # type: ignore[list-item]
]


@pytest.mark.parametrize("take", TAKEN)
def test_nowhere(place: Place, take: Callable[[Path], object]) -> None:
    place.close_source()
    place.close_home()
    take(place.temporary / f"gguf-tools-kernels-{os.geteuid()}")
    hits, where, said = place.run()
    assert (hits, where) == (0, "None")
    assert said.startswith("note: there is no place to keep compiled kernels: each run compiles them again;")
    assert said.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as whom Windows shows every owner")
def test_without_permissions_to_see_the_temporary_folder_is_ours(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows shows every folder as open to all."""
    place.close_source()
    place.close_home()
    folder = place.temporary / "gguf-tools-kernels-0"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.delattr(os, "geteuid")
    assert place.run()[1].startswith(str(folder))


def test_a_place_that_the_user_names(place: Place, tmp_path: Path) -> None:
    named = tmp_path / "named"
    place.name(named)
    assert place.run()[::2] == (0, "")
    hits, where, said = place.run()
    assert (hits, where.startswith(str(named)), said) == (1, True, "")
    for path in (Path(where), named):
        path.chmod(0o777)
    hits, where, said = place.run()
    assert hits == 0  # where anybody may write, nothing is run
    assert where.startswith(str(place.source.parent))
    assert said.startswith(f"note: NUMBA_CACHE_DIR ({named}) can't be used: compiled kernels are kept in ")
    assert said.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_files_of_another_user_are_not_run(place: Place) -> None:
    where = Path(place.run()[1])
    for path in (*where.glob("*.nbi"), *where.glob("*.nbc")):
        os.chown(path, 65534, 65534)
        assert place.run()[0] == 0
        assert path.stat().st_uid == os.geteuid()
        assert place.run()[0] == 1


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES = [
    lambda data: b"",
    flipped,
    pytest.param(lambda data: data[: len(data) // 2], marks=pytest.mark.slow),
    pytest.param(lambda data: bytes(len(data)), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_replaced(place: Place, damage: Callable[[bytes], bytes]) -> None:
    where = Path(place.run()[1])
    for path in (*where.glob("*.nbi"), *where.glob("*.nbc")):
        whole = path.read_bytes()
        path.write_bytes(damage(whole))
        hits, _, said = place.run()
        assert (hits, said, len(path.read_bytes())) == (0, "", len(whole))
    assert place.run()[0] == 1


def test_other_things_under_their_names(place: Place) -> None:
    where = Path(place.run()[1])
    index, data = *where.glob("*.nbi"), *where.glob("*.nbc")
    os.truncate(data, 0)
    index.unlink()
    os.mkfifo(index)  # which would be waited for
    assert place.run()[::2] == (0, "")
    assert place.run()[0] == 1
    index.unlink()
    index.mkdir()
    hits, _, said = place.run()
    assert hits == 0
    assert said.startswith(f"note: compiled kernels can't be kept in {where} (Is a directory): each run")
    assert not list(where.glob("*.tmp.*"))


def test_a_full_disk(place: Place) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, before[1]))
    try:
        hits, where, said = place.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert hits == 0
    assert said.startswith(f"note: compiled kernels can't be kept in {where} (File too large): each run")
    assert said.count("\n") == 1
    assert list(Path(where).glob("small*.nb*")) == []
