"""Split sets whose numbers contradict each other, the files' names, or the files that are there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from gguf_tools.commands.main import main as gguf_tools
from gguf_tools.errors import TruncatedError
from gguf_tools.format.reader import GGUFFile
from tests.hostile.fields import (
    I32,
    I64,
    U64,
    Fields,
    array,
    head,
    number,
    pair,
    strings,
    tensor,
    u32,
    u64,
    word,
)
from tests.hostile.warden import Warden

FIRST = "m-00001-of-00002.gguf"
SECOND = "m-00002-of-00002.gguf"


def part(index: Fields, count: Fields, *more: Fields, name: str = "") -> bytes:
    """A file with these pairs, and one tensor if it has a name."""
    pairs = (index, count, *more)
    fields = (*head(bool(name), len(pairs)), *(field for one in pairs for field in one))
    return b"".join((*fields, *(tensor(name) if name else ()), bytes(256)))


def no(index: int) -> Fields:
    return number("split.no", index)


def count(files: int) -> Fields:
    return number("split.count", files)


def one(name: str, index: Fields, files: Fields, *more: Fields) -> dict[str, bytes]:
    return {name: part(index, files, *more)}


SETS: dict[str, tuple[dict[str, bytes], str]] = {
    "65535 files of which one is there": (
        one("m-00001-of-65535.gguf", no(0), count(65535)), "65534 of 65535 parts are missing: m-00002-of"
    ),
    "65536 files": (one("m-00001-of-65536.gguf", no(0), count(65536)), "at most 65535"),
    "a billion files": (one("m-00001-of-1000000000.gguf", no(0), count(10**9)), "at most 65535"),
    "2**64-1 files": (
        one(f"m-00001-of-{2**64 - 1}.gguf", no(0), pair("split.count", U64, u64(2**64 - 1))), "at most 65535"
    ),
    "a negative number of files": (
        one(FIRST, no(0), pair("split.count", I32, u32(2**32 - 2))), "'split.count' is -2, expected a number"
    ),
    "a list of numbers of files": (
        one(FIRST, no(0), array("split.count", I32, 1, u32(2))), r"'split.count' is \[2\], expected a number"
    ),
    "a long text for a number": (
        one(FIRST, no(0), word("split.count", "2" * 10**6)), r"'2+'\.\.\. 1,000,000 characters, expected a n"
    ),
    "a negative place": (
        one(FIRST, pair("split.no", I64, u64(2**64 - 1)), count(2)), "'split.no' is -1, expected a number"
    ),
    "a place behind the last": (
        {**one("m-00003-of-00002.gguf", no(2), count(2)), FIRST: part(no(0), count(2), name="a"),
         SECOND: part(no(1), count(2), name="b")}, "part 3 of 2",
    ),
    "another place than the name's": (one(FIRST, no(1), count(2)), "expected a name that ends in -00002-of"),
    "a name without anything before the numbers": (
        one("-00001-of-00002.gguf", no(0), count(2)), "1 of 2 parts are missing: -00002-of-00002.gguf"
    ),
    "a second file that is none": (
        {FIRST: part(no(0), count(2), name="a"), SECOND: b"GGUF"}, "00002-of-00002.gguf: the version"
    ),
    "two first files": (
        {FIRST: part(no(0), count(2), name="a"), SECOND: part(no(0), count(2), name="b")},
        "is part 1 of 2 by its metadata, expected part 2 of 2",
    ),
    "a second file of another set": (
        {FIRST: part(no(0), count(2), name="a"), SECOND: part(no(1), count(3), name="b")},
        "is part 2 of 3 by its metadata, expected part 2 of 2",
    ),
    "a tensor in both": (
        {FIRST: part(no(0), count(2), name="a" * 1000), SECOND: part(no(1), count(2), name="a" * 1000)},
        r"tensor 'a+'\.\.\. is in m-00001-of-00002.gguf too",
    ),
    "more tensors than there are": (
        {FIRST: part(no(0), count(2), number("split.tensors.count", 2**31), name="a"),
         SECOND: part(no(1), count(2), name="b")}, "hold 2 tensors, the metadata say 2147483648",
    ),
    "a text for the number of tensors": (
        {FIRST: part(no(0), count(2), strings("split.tensors.count", *["x" * 1000] * 1000), name="a"),
         SECOND: part(no(1), count(2), name="b")}, r"hold 2 tensors, the metadata say \['xxx",
    ),
}  # fmt: skip


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder / next(iter(files))


@pytest.mark.parametrize("name", SETS)
def test_set_is_refused_in_one_line(
    warden: Warden, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    files, says = SETS[name]
    path = write(tmp_path, files)
    outcome = warden.read("gguf", path)
    assert outcome.how == "refused", outcome
    assert re.search(says, outcome.text), outcome
    assert outcome.text.isprintable()
    assert len(outcome.text) < 1000
    assert gguf_tools(["hash", str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_refused_set_leaves_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name, (files, _) in SETS.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        assert gguf_tools(["hash", str(write(folder, files))]) == 1
    assert len(os.listdir("/proc/self/fd")) == before


# --- files that change while they are read ----------------------------------------------------------------


def test_file_that_shrinks_while_its_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"".join((*head(0, 1), *strings("k", *["x" * 100] * 10_000))))
    whole = path.stat().st_size
    read = os.pread

    def read_and_cut(descriptor: int, n_bytes: int, offset: int) -> bytes:
        data = read(descriptor, n_bytes, offset)
        os.truncate(path, whole // 2)
        return data

    monkeypatch.setattr(os, "pread", read_and_cut)
    with pytest.raises(TruncatedError, match=rf"ends at byte {whole // 2}, had {whole} bytes"):
        GGUFFile(path)


def test_file_that_shrank_can_not_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"".join((*head(1), *tensor("t"), bytes(256))))
    with GGUFFile(path) as file:
        os.truncate(path, 100)
        with pytest.raises(TruncatedError, match="has become shorter"):
            file.raw("t")
