"""Inputs: what is looked at to notice a change, and what is not taken for one."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from gguf_tools import ChangedInput
from gguf_tools.files import inputs
from gguf_tools.files.inputs import InputFile, InputWatch, Status, gguf_input, sample_places
from gguf_tools.format.reader import GGUFFile
from tests.gguf_tools.sample_files import write_file


@pytest.fixture
def file(tmp_path: Path) -> InputFile:
    write_file(tmp_path / "in.gguf")
    with GGUFFile(tmp_path / "in.gguf") as opened:
        return replace(gguf_input(opened), fd=None)


def flip(path: Path, offset: int) -> None:
    status = path.stat()
    with open(path, "r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_change_in_any_tensor_is_noticed_and_the_tensor_is_named(file: InputFile) -> None:
    for name, (offset, n_bytes) in file.places.items():
        for place in (offset, offset + n_bytes - 1):
            watch = InputWatch([file])
            before = watch.digests
            flip(file.path, place)
            with pytest.raises(ChangedInput, match=f"{file.path}: was changed .*{name} holds other numbers"):
                watch.refuse_changed()
            after = InputWatch([file]).digests[file.name]
            assert [key for key in after.tensors if after.tensors[key] != before[file.name].tensors[key]] == [
                name
            ]


def test_a_change_of_the_header_is_noticed(file: InputFile) -> None:
    watch = InputWatch([file])
    flip(file.path, 100)
    with pytest.raises(ChangedInput, match="its header is different"):
        watch.refuse_changed()


def test_a_change_of_the_size_is_noticed(file: InputFile) -> None:
    watch = InputWatch([file])
    n_bytes = file.path.stat().st_size
    os.truncate(file.path, n_bytes - 1)
    with pytest.raises(ChangedInput, match=f"had {n_bytes:,} bytes, and has {n_bytes - 1:,}"):
        watch.refuse_changed()


def test_names_that_other_processes_open_must_stay(file: InputFile) -> None:
    watch = InputWatch([file], by_path=True)
    file.path.unlink()
    with pytest.raises(ChangedInput, match=f"{file.path}: can't be read any more: No such file"):
        watch.refuse_changed()
    file.path.mkdir()
    with pytest.raises(ChangedInput, match="not a regular file"):
        watch.refuse_changed()


def test_a_file_that_is_open_stays_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "in.gguf"
    write_file(path)
    with GGUFFile(path) as opened:
        watch = InputWatch([gguf_input(opened)])
        path.unlink()
        path.write_bytes(b"another model")
        watch.refuse_changed()


def test_the_same_bytes_elsewhere_are_the_same_input(file: InputFile, tmp_path: Path) -> None:
    watch = InputWatch([file])
    state = watch.state
    shutil.copy(file.path, tmp_path / "copy")
    os.replace(tmp_path / "copy", file.path)
    watch.refuse_changed()
    again = InputWatch([file])
    assert again.digests == watch.digests
    assert again.recognised_by() == watch.recognised_by()
    assert again.state != state


def test_nothing_is_read_again_of_a_file_that_nobody_has_written_to(
    file: InputFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_FINE_CLOCK", 0)
    watch = InputWatch([file])
    monkeypatch.setattr(inputs, "_look_at", None)
    watch.refuse_changed()


def test_times_that_can_hide_a_change_are_not_trusted() -> None:
    now = time.time_ns() // 10**9 * 10**9
    fine, coarse = now + 1, now
    assert Status(0, 0, 0, 0, fine).may_hide_a_change(fine + 10_000_000)
    assert not Status(0, 0, 0, 0, fine).may_hide_a_change(fine + 30_000_000)
    assert Status(0, 0, 0, 0, coarse).may_hide_a_change(coarse + 1_900_000_000)
    assert not Status(0, 0, 0, 0, coarse).may_hide_a_change(coarse + 2_000_000_000)


def test_a_file_whose_tensors_are_not_known_is_looked_at_in_many_places(tmp_path: Path) -> None:
    path = tmp_path / "large"
    n_bytes = 3 << 30  # of zeros that take no space
    with open(path, "wb") as stream:
        stream.truncate(n_bytes)
    seen = {str(InputWatch([path]).digests["large"])}
    places = [0, (1 << 20) - 1, n_bytes - 1, *(n_bytes * piece // 16 for piece in range(1, 16))]
    for place in places:
        flip(path, place)
        seen.add(str(InputWatch([path]).digests["large"]))
    assert len(seen) == 1 + len(places)


@pytest.mark.parametrize("n_bytes", [1, 1 << 20, (1 << 20) + 1, 14 << 20, 5 << 30])
def test_samples_are_of_the_start_the_end_and_between(n_bytes: int) -> None:
    places = sample_places(n_bytes)
    assert places[0][0] == 0
    assert sum(places[-1]) == n_bytes
    assert len(places) == {1: 1, 1 << 20: 1, (1 << 20) + 1: 4, 14 << 20: 4, 5 << 30: 64}[n_bytes]
    assert all(after[0] - before[0] <= n_bytes // 3 for before, after in pairwise(places))


def test_how_large_a_change_can_pass() -> None:
    """As docs/reliability.md says."""
    for n_bytes in range(1 << 20, 1 << 30, 999_983):
        most = max(((b[0] - sum(a)) for a, b in pairwise(sample_places(n_bytes))), default=0)
        assert most <= (7 << 20 if n_bytes <= 256 << 20 else n_bytes // 63)


def test_many_tensors_are_digested_as_few_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in"
    path.write_bytes(os.urandom(3000))
    file = InputFile(path, {f"t{i}": (10 * i, 10) for i in range(300)})
    with_threads = InputWatch([file]).digests
    monkeypatch.setattr(inputs, "_A_FEW", 1000)
    inputs._known_digest.cache_clear()
    assert InputWatch([file]).digests == with_threads
