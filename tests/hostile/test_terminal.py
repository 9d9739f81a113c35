"""Names and texts that would control a terminal: nothing raw of them is printed, by any command.

They are in the folder that files lie in, in names of files, tensors and keys, and in values. A new command
needs an entry in `COMMANDS` of tests/hostile/odd_names.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import gguf_tools.commands.convert
import gguf_tools.commands.evaluate
import gguf_tools.commands.imatrix
import gguf_tools.commands.lint
import gguf_tools.commands.main
import gguf_tools.commands.quantize
import gguf_tools.commands.sensitivity
from gguf_tools import progress
from gguf_tools.commands.main import parsers
from gguf_tools.commands.parser import subparsers_of
from gguf_tools.commands.roof import COMMANDS as TWO_NAMES
from gguf_tools.findings import Finding, teller
from gguf_tools.text import html_text, printable, say, say_aside, say_json, table
from tests.hostile.odd_names import COMMANDS, EVIL, run, typed

pytest.importorskip("torch")

RAW = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff]|^FORGED",
    re.MULTILINE,
)


def test_all_commands_are_tried() -> None:
    known = parsers()
    twins = tuple(f"{each.prog} " for each in TWO_NAMES)
    own = {prog: parser for prog, parser in known.items() if not f"{prog} ".startswith(twins)}
    leaves = {prog for prog, parser in own.items() if not subparsers_of(parser)} | {"imatrix"}
    assert leaves == set(COMMANDS)


@pytest.mark.parametrize(
    ("prog", "words"),
    [
        pytest.param(prog, words, marks=pytest.mark.slow if words != tried[0] else ())
        for prog, tried in COMMANDS.items()
        for words in tried
    ],
)
def test_nothing_raw_is_printed(
    names: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], prog: str, words: str
) -> None:
    folder = tmp_path / EVIL
    folder.mkdir()
    code = run(prog, typed(words, names, folder))
    said = capfd.readouterr()
    assert not RAW.search(said.out + said.err), said
    assert code or said.out
    if words.endswith("--json") and code == 0:
        json.loads(said.out)
    for page in folder.glob("*.html"):
        assert not RAW.search(page.read_text())


def test_a_trace_is_escaped_too(names: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert gguf_tools.commands.main.main(["show", "--verbose", names["TEXT"]]) == 1
    error = capfd.readouterr().err
    assert "Traceback" in error
    assert not RAW.search(error)


def test_bars_are_escaped(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "has_terminal", lambda: True)
    with progress.Bar(EVIL, progress.WORK) as bar:
        bar.start(2)
        bar.remark(EVIL)
        bar.advance(1)
    drawn = capfd.readouterr().err
    assert "FORGED" in drawn
    assert not RAW.search(re.sub("\r|\x1b\\[A", "", drawn))


def test_findings_and_lines_are_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    teller(quiet=False)(Finding("kind", EVIL))
    say(EVIL, EVIL)
    say_aside(EVIL)
    say_json({EVIL: EVIL})
    said = capfd.readouterr()
    assert not RAW.search(said.out + said.err)
    assert json.loads(said.out.split("\n", 2)[2]) == {EVIL: EVIL}


def test_columns_are_as_wide_as_what_is_printed() -> None:
    lines = table([("name", "size"), (EVIL, "1"), ("plain", "2")])
    assert len({line.rindex(" ") for line in lines}) == 1
    assert not any(map(RAW.search, lines))


@pytest.mark.parametrize("text", ["plain", "\u6df1\u5733 ascii", "\U0001f600", "a b"])
def test_other_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_text_in_pages_is_escaped_twice() -> None:
    assert html_text("<b>\x1b\n&\u202e") == "&lt;b&gt;\\x1b\\n&amp;\\u202e"
