"""`gguf-tools set`, `remove-key`, `rename`, `split` and `merge` as a user types them."""

from __future__ import annotations

import errno
import json
import os
import random
import sys
from functools import partial
from pathlib import Path

import pytest

from gguf_tools import GGUFFile, Value, open_gguf
from gguf_tools.commands.main import main
from gguf_tools.edit import in_place
from gguf_tools.progress import Bar
from tests.gguf_tools.sample_files import METADATA, TENSORS, write_file
from tests.support.killing import in_child, killed_at


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the current folder, so that messages are short."""
    monkeypatch.chdir(tmp_path)
    write_file(Path("a.gguf"))
    return Path("a.gguf")


def test_set_says_what_was_and_what_is(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    code, out, err = run(capsys, "set", path, "general.name=x=y: z", "a.i8=-5", "new=[str]:a,b")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "general.name: 'Größe 深度 🐳' -> 'x=y: z'",
        "a.i8: -128 -> -5",
        "new: added array of string ['a', 'b']",
        f"a.gguf: written anew, {path.stat().st_size:,} bytes",
    ]
    code, out, _ = run(capsys, "set", path, "a.i8=6", "a.u64=0", "--dry-run")
    assert out.splitlines()[-1] == f"a.gguf: would be changed in place, {GGUFFile(path).data_start:,} bytes"
    code, out, _ = run(capsys, "set", path, "a.i8=6", "a.u64=0")
    assert out.splitlines()[-1] == f"a.gguf: changed in place, {GGUFFile(path).data_start:,} bytes"
    assert run(capsys, "set", path, "a.i8=6") == (0, "a.gguf: has it so already\n", "")
    with GGUFFile(path) as file:
        assert file.metadata == METADATA | {
            "general.name": Value.string("x=y: z"), "a.i8": Value.i8(6), "a.u64": Value.u64(0),
            "new": Value.strings(["a", "b"]),
        }  # fmt: skip


def test_a_chat_template_comes_from_a_file(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    template = "{% for m in messages %}\n" + "x" * 500 + "\r\n"
    Path("chat.jinja").write_bytes(template.encode())
    code, out, _ = run(capsys, "set", path, "tokenizer.chat_template=str@chat.jinja", "-o", "out.gguf")
    assert code == 0
    assert out.startswith("tokenizer.chat_template: added string '{% for m in messages %}\\nx")
    assert out.splitlines()[1].startswith("out.gguf: written, ")
    with GGUFFile("out.gguf") as file:
        assert file.get("tokenizer.chat_template") == template


def test_remove_key(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    code, out, err = run(capsys, "remove-key", path, "a.u8", "a.strings", "-o", "out.gguf")
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == [
        "a.u8: removed, was uint8 255",
        "a.strings: removed, was array of string ['', 'a', 'ü', '\\udcff\\udcfe not UTF-8']",
    ]
    with GGUFFile("out.gguf") as file:
        assert list(file.metadata) == [key for key in METADATA if key not in ("a.u8", "a.strings")]


def test_rename(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    code, out, err = run(capsys, "rename", path, "--regex", r"^blk\.(\d+)(?=\.)=layer.\1", "norm=n")
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == [
        "tensor output_norm.weight -> output_n.weight",
        "tensor blk.0.ffn_down_exps.weight -> layer.0.ffn_down_exps.weight",
    ]
    assert run(capsys, "rename", path, "--key", "a.u8=a.number")[1].splitlines()[0] == "key a.u8 -> a.number"
    with GGUFFile(path) as file:
        assert "layer.1.four_d.weight" in file.tensors
        assert list(file.metadata)[2] == "a.number"


def test_json(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    _, out, _ = run(capsys, "set", path, "a.u8=7", "--json", "--dry-run")
    assert json.loads(out) == {
        "dry_run": True,
        "restored": [],
        "changes": [
            {
                "action": "set", "name": "a.u8",
                "old": {"type": "uint8", "value": 255}, "new": {"type": "uint8", "value": 7},
            }
        ],
        "files": [{"path": "a.gguf", "how": "in place", "bytes_written": GGUFFile(path).data_start}],
    }  # fmt: skip
    _, out, _ = run(capsys, "split", path, "m", "--max-tensors", 4, "--json")
    files = json.loads(out)["files"]
    assert [(entry["path"], entry["tensors"]) for entry in files] == [
        ("m-00001-of-00002.gguf", 4),
        ("m-00002-of-00002.gguf", 2),
    ]
    assert [entry["bytes"] for entry in files] == [Path(entry["path"]).stat().st_size for entry in files]


def test_split_and_merge(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    code, out, _ = run(capsys, "split", path, "m", "--max-size", "1K", "--dry-run")
    assert code == 0
    assert out.splitlines()[0].startswith("m-00001-of-00003.gguf: would have 2 tensors, ")
    assert [name.name for name in Path().iterdir()] == ["a.gguf"]
    code, out, _ = run(capsys, "split", path, "m", "--split-max-tensors", 5)
    assert [line.split(", ")[1] for line in out.splitlines()] == ["5 tensors", "1 tensor"]
    code, out, _ = run(capsys, "merge", "m-00002-of-00002.gguf", "b.gguf")
    assert out == f"b.gguf: written, {len(TENSORS)} tensors, {path.stat().st_size:,} bytes\n"
    assert Path("b.gguf").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["set", "a.gguf"], "arguments are required: KEY=TYPE:VALUE"),
        (["set", "a.gguf", "k"], "argument KEY=TYPE:VALUE: 'k': expected KEY=TYPE:VALUE"),
        (["set", "a.gguf", "k=int:5"], "argument KEY=TYPE:VALUE: key 'k': 'int' is not a type"),
        (["set", "a.gguf", "k=str@nope"], "argument KEY=TYPE:VALUE: nope: can't be read (No such file"),
        (["rename", "a.gguf", "k"], "argument OLD=NEW: 'k': expected OLD=NEW"),
        (["rename", "a.gguf", "=k"], "argument OLD=NEW: '=k': expected OLD=NEW"),
        (["remove-key", "a.gguf"], "arguments are required: KEY"),
        (["split", "a.gguf"], "arguments are required: PREFIX"),
        (["split", "a.gguf", "m", "--max-size", "5"], "'5' is no size, expected a number with M or G"),
        (["split", "a.gguf", "m", "--max-size", "0M"], "'0M' is no size"),
        (["split", "a.gguf", "m", "--max-size", "1.5G"], "'1.5G' is no size"),
        (["split", "a.gguf", "m", "--max-tensors", "0"], "'0' is not a whole number from 1"),
        (["split", "a.gguf", "m", "--max-tensors", "-1"], "'-1' is not a whole number from 1"),
    ],
)
def test_arguments_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], path: Path, arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["set", "nope.gguf", "k=u8:1"], "nope.gguf: No such file or directory"),
        (["set", "a.gguf", "k=1"], "a.gguf: key 'k' is new: say its type, as in k=str:1"),
        (["set", "a.gguf", "a.u8=256"], "a.gguf: key 'a.u8': '256' is not a number that uint8 can hold"),
        (["set", "a.gguf", "split.no=u16:1"], "a.gguf: key 'split.no' is only for split and merge"),
        (["set", "a.gguf", "a.u8=1", "-o", "a.gguf"], "a.gguf: is an input of this run"),
        (["remove-key", "a.gguf", "general.architecture"], "a.gguf: key 'general.architecture' can't be"),
        (["rename", "a.gguf", "nope=x"], "a.gguf: no tensor 'nope'"),
        (["rename", "a.gguf", "--regex", "(=x"], "a.gguf: '(' is not a regular expression"),
        (["split", "nope.gguf", "m"], "nope.gguf: No such file or directory"),
        (["split", "a.gguf", "no/m"], "no/m-00001-of-00001.gguf.partial: can't be created: No such file"),
        (["merge", "a.gguf", "b.gguf"], "a.gguf: is a complete model, not part of a split set"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], path: Path, arguments: list[str], message: str
) -> None:
    before = path.read_bytes()
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"gguf-tools: error: {message}")
    assert err.count("\n") == 1
    assert path.read_bytes() == before
    assert [name.name for name in Path().iterdir()] == ["a.gguf"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["set", "a.gguf", "a.u8=9"],
        ["set", "a.gguf", "a.u8=9", "-o", "b.gguf"],
        ["remove-key", "a.gguf", "a.i8"],
        ["rename", "a.gguf", "output_norm.weight=x"],
        ["split", "a.gguf", "m"],
    ],
)
def test_every_command_restores_what_was_interrupted(
    capsys: pytest.CaptureFixture[str], path: Path, arguments: list[str]
) -> None:
    old = path.read_bytes()
    change = ["set", "a.gguf", "a.u8=7", "general.name=ärÖßeG 深度 🐳"]
    n = next(n for n in range(50) if killed_at(n, partial(main, change), "torn") and path.read_bytes() != old)
    assert n
    capsys.readouterr()
    dry = [*arguments, "--dry-run"]
    assert run(capsys, *dry)[::2] == (
        1,
        "gguf-tools: error: a.gguf: an edit was interrupted; run without --dry-run to restore it from "
        "a.gguf.undo\n",
    )
    code, _, err = run(capsys, *arguments)
    assert code == 0
    assert err == "a.gguf: an interrupted edit was undone, the header is the old one again\n"
    assert not in_place.undo_path(path).exists()
    with open_gguf(path) as source:
        assert source.get("general.name") == METADATA["general.name"].data


def test_a_split_goes_on_after_a_name_could_not_be_given(
    capsys: pytest.CaptureFixture[str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, "split", path, "whole", "--max-tensors", 2)[0] == 0
    rename, n_renamed = os.rename, 0

    def fail_once(old: Path, new: Path) -> None:
        nonlocal n_renamed
        n_renamed += 1
        if n_renamed == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(old, new)

    monkeypatch.setattr(os, "rename", fail_once)
    assert run(capsys, "split", path, "m", "--max-tensors", 2)[0] == 1
    assert sorted(each.name for each in Path().glob("m-*")) == [
        "m-00001-of-00003.gguf.partial", "m-00002-of-00003.gguf.partial", "m-00003-of-00003.gguf",
    ]  # fmt: skip
    assert run(capsys, "split", path, "m", "--max-tensors", 2)[0] == 0
    for part in Path().glob("whole-*"):
        assert Path(part.name.replace("whole", "m")).read_bytes() == part.read_bytes()
    assert len(list(Path().glob("m-*"))) == 3


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """kill -9 while keys are set in place again and again, in a large header: no file is ever torn."""
    path = tmp_path / "a.gguf"
    tokens = Value.strings(f"token {i:08}" for i in range(50_000))
    write_file(path, METADATA | {"tokens": tokens, "last": METADATA["a.u32"]}, TENSORS)
    with open_gguf(path) as source:
        data = {name: source.raw(name).tobytes() for name in source.tensors}
        data_start = source.shards[0].data_start
    random_ = random.Random(1)

    def work() -> None:
        sys.stdout = sys.stderr = open("/dev/null", "w")  # noqa: SIM115
        for number in range(10**9):
            if main(["set", str(path), f"a.u32={number}", f"last={number}"]):
                raise RuntimeError

    for _ in range(5):
        assert in_child(work, kill_after=random_.uniform(0.3, 0.8)) == -9
        assert main(["set", str(path), "a.u8=1"]) == 0
        with open_gguf(path) as source:
            assert source.get("a.u32") == source.get("last")
            assert source.shards[0].data_start == data_start
            assert source.metadata["tokens"] == tokens
            assert {name: source.raw(name).tobytes() for name in source.tensors} == data


def test_long_copies_show_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bar("copying") as bar:
        bar.start(100)(100)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Bar("copying") as bar:
        advance = bar.start(2048)
        advance(1024)
        advance(1024)
    assert "copying: 100%" in capsys.readouterr().err
    with Bar("copying") as bar:
        bar.start(0)
    assert capsys.readouterr().err == ""


def test_help_tells_the_types(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "set", "--help")
    assert code == 0
    assert "KEY=TYPE:VALUE" in out
    assert "[str]:" in out
