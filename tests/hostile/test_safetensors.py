"""safetensors files with impossible or costly lengths, JSON, names, shapes and ranges."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from gguf_tools.commands.main import main as gguf_tools
from tests.hostile.warden import Warden


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    """A file with this header, given as an object or as bytes; `length` is the header's claimed length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


HUGE = 2**63 - 1
CASES: dict[str, tuple[bytes, str]] = {
    "header longer than the file": (file({"x": entry()}, length=2**40), "is said to take 1099511627776"),
    "header of 2**64-1 bytes": (file({"x": entry()}, length=2**64 - 1), "header is said to take"),
    "header that ends within the data": (file({"x": entry()}, length=60), "the header is not JSON"),
    "no header": (file(b"", b""), "not JSON"),
    "nothing": (b"", "too short for a safetensors file"),
    "list": (file([]), "not a JSON object"),
    "space before the object": (file(b" {}", b""), "not a JSON object"),
    "byte order mark": (file(b"\xef\xbb\xbf{}", b""), "not JSON"),
    "UTF-16": (file('{"x": 1}'.encode("utf-16")), "not JSON"),
    "bytes that are not UTF-8": (file(b'{"\xff": 1}'), "not JSON"),
    "lone surrogate in bytes": (file(b'{"\xed\xa0\x80": 1}'), "not JSON"),
    "lone surrogate as an escape": (file(rb'{"\ud800": 1}'), r"'\\ud800': the header entry needs"),
    "NaN for an offset": (file(b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,NaN]}}'), "not two off"),
    "infinite shape": (file(b'{"x":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,8]}}'), "not a list"),
    "fractions": (file({"x": entry(offsets=(0.0, 8.0))}), "not two offsets"),
    "truth values": (file({"x": entry("U8", [True], [False, True])}), "not a list of sizes"),
    "negative offsets": (file({"x": entry(offsets=(-8, 0))}), "not two offsets"),
    "negative shape": (file({"x": entry(shape=(-2, -1))}), "not a list of sizes"),
    "offsets turned round": (file({"x": entry(offsets=(8, 0))}), "-8 bytes of data, expected 8"),
    "number of 5000 digits": (file(b'{"x":{"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}"), "not JSON"),
    "number beyond 64 bits": (file({"x": entry(shape=[2**64])}), "not a list of sizes"),
    "product that wraps to 8": (file({"x": entry(shape=(2**62, 4, 2))}), "8 bytes of data, expected 1.47"),
    "product of 16 huge numbers": (file({"x": entry(shape=[HUGE] * 16)}), "8 bytes of data, expected"),
    "17 dimensions": (file({"x": entry(shape=[1] * 17)}), "not a list of sizes"),
    "end beyond 64 bits": (file({"x": entry(offsets=(HUGE - 7, HUGE + 1))}), "not two offsets"),
    "end behind the file": (file({"x": entry("U8", [HUGE - 1], (0, HUGE - 1))}), "x: cut off"),
    "name twice": (
        file(b'{"x":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"x":{"dtype":"U8"}}'),
        "x appears twice",
    ),
    "long name twice": (file(b'{"%b":1,"%b":1}' % (b"n" * 10**6, b"n" * 10**6)), r"'n+'\.\.\. appears"),
    "metadata twice": (file(b'{"__metadata__":{},"__metadata__":{"a":"b"}}', b""), "__metadata__ appears"),
    "metadata that are numbers": (file({"__metadata__": {"a": 1}}, b""), "not a mapping of strings"),
    "hole before the data": (file({"x": entry(offsets=(8, 16))}, bytes(16)), "a hole after the header"),
    "hole between": (file({"x": entry(), "y": entry(offsets=(9, 17))}, bytes(17)), "y: .* a hole after x"),
    "overlap": (file({"x": entry(), "y": entry(offsets=(4, 12))}, bytes(12)), "y: .* an overlap after x"),
    "tail": (file({"x": entry()}, bytes(9)), "9 bytes of data, expected 8: a tail after x"),
    "name that moves the cursor": (file({"\x1b[2J\n": entry(offsets=(1, 9))}), r"'\\x1b\[2J\\n': data"),
    "unknown type": (file({"x": entry("Q4_K")}), "unknown dtype 'Q4_K'"),
    "type that is a list": (file({"x": entry(["F32"])}), "unknown dtype"),
    "entry that is a list": (file({"x": ["F32", [2], [0, 8]]}), "the header entry needs"),
    "half a byte": (file({"x": entry("F4", [3], (0, 2))}), "2 bytes of data, expected 1.5"),
    "nested 100,000 deep": (file(b"[" * 100_000), "nested deeper than 100"),
    "objects nested 100,000 deep": (file(b'{"a":' * 100_000), "nested deeper than 100"),
    "nested 200 deep": (file(b'{"a":' + b"[" * 200 + b"]" * 200 + b"}"), "nested deeper than 100"),
    "5 million empty lists": (file(b'{"a":[' + b"[]," * 5_000_000 + b"0]}"), "more than 160 MiB of memory"),
    "a million objects": (file(b'{"a":[' + b'{"":0},' * 1_000_000 + b"0]}"), "more than 160 MiB of memory"),
    "20 MB, wide for one letter": (file(b'{"a":"%b\xf0\x9f\x98\x80"}' % (b"a" * 20_000_000)), "160 MiB"),
}


def test_a_valid_file_is_opened(warden: Warden, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file({"x": entry(), "y": entry("U8", [0, 5], (8, 8)), "__metadata__": {"format": "pt"}}))
    assert warden.read("safetensors", path).how == "opened"


@pytest.mark.parametrize("name", CASES)
def test_file_is_refused_in_one_line(warden: Warden, tmp_path: Path, name: str) -> None:
    data, says = CASES[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    outcome = warden.read("safetensors", path)
    assert outcome.how == "refused", outcome
    assert re.search(says, outcome.text), outcome
    assert outcome.text.isprintable()
    assert len(outcome.text) < 1000


def test_a_header_of_100_mb_is_not_read(warden: Warden, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as stream:
        stream.write((10**8 + 1).to_bytes(8, "little"))
        stream.truncate(10**9)
    outcome = warden.read("safetensors", path)
    assert outcome.how == "refused"
    assert "expected at most 100000000" in outcome.text
    assert outcome.memory < 10_000_000


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder"])
def test_what_is_no_file_is_not_waited_for(
    warden: Warden, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "model.safetensors"
    make = {"pipe": os.mkfifo, "endless": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir}
    make[kind](path)
    outcome = warden.read("safetensors", path)
    assert (outcome.how, outcome.text) == ("refused", f"{path}: not a regular file")
    (tmp_path / "config.json").write_text("{}")
    assert gguf_tools(["checkpoint", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"gguf-tools: error: {path}: not a regular file\n"
