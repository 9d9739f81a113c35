"""Importance matrix files in both forms, with impossible counts, lengths and numbers."""

from __future__ import annotations

import os
import re
import struct
from math import prod
from pathlib import Path

import pytest

from gguf_tools.commands.imatrix import main as imatrix
from gguf_tools.format.header import align_up
from tests.fuzz.imatrix import DAT, GGUF
from tests.hostile.fields import U64, Fields, head, number, pair, strings, tensor, u64, word
from tests.hostile.warden import Warden


def i32(value: int) -> bytes:
    return struct.pack("<i", value)


def f32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def dat(name: bytes = b"a", n_calls: int = 1, n_values: int = 1, data: bytes = f32(1.0)) -> Fields:
    """One entry of a .dat file."""
    return i32(len(name)), name, i32(n_calls), i32(n_values), data


def gguf(
    values: tuple[int, ...], counts: tuple[int, ...], *pairs: Fields, type_id: int = 0, numbers: bytes = b""
) -> Fields:
    """A GGUF file with the entry "a"; its values begin with `numbers`, its counts are 32 bytes or more on."""
    fields = (
        *head(2, 1 + len(pairs)),
        *word("general.type", "imatrix"),
        *(field for one in pairs for field in one),
        *tensor("a.in_sum2", values, type_id, 0),
        *tensor("a.counts", counts, 0, align_up(4 * prod(values), 32)),
    )
    n_bytes = len(b"".join(fields))
    return *fields, bytes(align_up(n_bytes, 32) - n_bytes), numbers


NAN = float("nan")
CASES: dict[str, tuple[Fields, str | None, int]] = {
    ".dat": (DAT, None, 0),
    ".dat, negative number of entries": ((i32(-1), *dat()), "no .dat with -1 entries", 0),
    ".dat, no entry": ((i32(0), bytes(64)), "no .dat with 0 entries", 0),
    ".dat, 2**31-1 entries": ((i32(2**31 - 1), *dat()), "no .dat with 2147483647 entries", 0),
    ".dat, 2**31-1 entries in a file that could hold them": ((i32(2**31 - 1),), "no .dat with 214", 2**35),
    ".dat, 10 million entries": ((i32(10**7),), "no .dat with 10000000 entries", 2**30),
    ".dat, name of -1 bytes": ((i32(1), i32(-1), bytes(64)), "would take -1 bytes", 0),
    ".dat, name of 2 GB": ((i32(1), i32(2**31 - 1)), "has 2147483647 bytes, expected at most 4096", 2**32),
    ".dat, -1 values": ((i32(1), *dat(n_values=-1)), "found -1 as the number of the values of a", 0),
    ".dat, 2**31-1 values": ((i32(1), *dat(n_values=2**31 - 1)), "found 2147483647 as the number", 0),
    ".dat, 2**31-1 values that are there": (
        (i32(1), *dat(n_values=2**31 - 1)), "found 2147483647 as the number of the values of a", 2**34
    ),
    ".dat, one value missing": ((i32(1), *dat(n_values=2)), "the values of a would take 8 bytes", 0),
    ".dat, -5 calls": ((i32(1), *dat(n_calls=-5)), None, 0),
    ".dat, -5 chunks": ((i32(1), *dat(), i32(-5)), None, 0),
    ".dat, name twice": ((i32(2), *dat(), *dat()), "a: found twice", 0),
    ".dat, name that moves the cursor": ((i32(2), *dat(b"\x1b[2J"), *dat(b"\x1b[2J")), r"'\\x1b\[2J': fo", 0),
    ".dat, NaN": ((i32(1), *dat(data=f32(NAN))), None, 0),
    "GGUF": (GGUF, None, 0),
    "GGUF, NaN for a count": (gguf((2,), (1,), numbers=f32(1, 2, *[0] * 6, NAN)), None, 9000),
    "GGUF, terabyte of counts": (gguf((2**38,), (2**38,)), "expected at most 8388608 and 4096", 2**42),
    "GGUF, a billion values": (gguf((2**30,), (1,)), "expected at most 8388608 and", 2**33),
    "GGUF, more values than any model has": (gguf((2**24,), (1,)), "expected at most", 2**27),
    "GGUF, values in F16": (gguf((2,), (1,), type_id=1), "found F16, expected F32", 9000),
    "GGUF, values that counts don't divide": (gguf((3,), (2,)), "found 3 values and 2 counts", 9000),
    "GGUF, dataset that is a number": (
        gguf((2,), (1,), number("imatrix.datasets", 1)), "expected a list of names", 9000
    ),
    "GGUF, 2**63 chunks": (gguf((2,), (1,), pair("imatrix.chunk_count", U64, u64(2**63))), None, 9000),
    "GGUF, chunks that are texts": (
        gguf((2,), (1,), strings("imatrix.chunk_count", *["x"] * 10_000)), "expected a whole number", 10**6
    ),
    "empty": ((), "not an importance matrix", 0),
}  # fmt: skip


def write(folder: Path, name: str) -> Path:
    fields, _, total_bytes = CASES[name]
    path = folder / "strange.imatrix"
    with path.open("wb") as file:
        file.writelines(fields)
        if total_bytes:
            file.truncate(total_bytes)
    return path


@pytest.mark.parametrize("name", CASES)
def test_file_is_refused_in_one_line_or_opened(
    warden: Warden, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    says = CASES[name][1]
    path = write(tmp_path, name)
    outcome = warden.read("imatrix", path)
    code = imatrix(["show", str(path)])
    err = capsys.readouterr().err
    if says is None:
        assert outcome.how == "opened", outcome
        assert (code, err) == (0, "")
        return
    assert outcome.how == "refused", outcome
    assert re.search(says, outcome.text), outcome
    assert outcome.text.isprintable()
    assert code == 1
    assert err.count("\n") == 1


INFINITE = gguf((2,), (1,), numbers=f32(1, 2, *[0] * 6, float("inf")))
MANY = gguf((2,), (1,), numbers=f32(1, 2, *[0] * 6, 2.0**40))
CHUNKS = gguf((2,), (1,), pair("imatrix.chunk_count", U64, u64(2**63)), numbers=f32(1, 2, *[0] * 6, 3))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (INFINITE, "a: a count of inf, more than the .dat form holds"),
        (MANY, "a: a count of 1099511627776.0, more than the .dat form holds"),
        (CHUNKS, "9223372036854775808 chunks, the .dat form holds up to 2147483647"),
    ],
    ids=["infinite", "2**40", "2**63 chunks"],
)
def test_what_dat_can_not_hold_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: Fields, says: str
) -> None:
    path = tmp_path / "strange.imatrix"
    path.write_bytes(b"".join(fields).ljust(9000, b"\0"))
    assert imatrix(["convert", str(path), str(tmp_path / "out.dat")]) == 1
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out.dat").exists()


def test_a_pipe_is_not_waited_for(warden: Warden, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    outcome = warden.read("imatrix", tmp_path / "pipe")
    assert (outcome.how, outcome.text) == ("refused", f"{tmp_path / 'pipe'}: not a regular file")
