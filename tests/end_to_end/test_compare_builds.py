"""scripts/compare_builds.py finds what differs between two builds, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("fcntl")

from scripts import compare_builds
from scripts.builds.cases import all_chains
from scripts.builds.chains import PROGRAMS, Chain, Command, chain
from scripts.builds.normal import differences, normal
from scripts.builds.outcomes import Build, Outcome, run_chain

STUB = """#!/bin/sh
case "$*" in
    speak*) echo "wrote $2 in 0.$$ s ($$.5 MiB a second)"; echo "BUILD says $2" >&2;;
    write*) printf 'abc\\0LETTER' > $2;;
    read*) cat $2;;
    fail*) exit CODE;;
    both*) printf "in\\nBUILD\\n" > $2; exit CODE;;
esac
"""

CHAINS = [
    chain("alike", "quantize speak a.gguf \n quantize write b.gguf \n quantize write b.gguf"),
    chain("files", "gguf-tools write o.gguf \n gguf-tools read o.gguf \n gguf-tools read mine"),
    chain("codes", "# a remark \n NAME=value imatrix fail \n imatrix both text.txt"),
]

Make = Callable[..., str]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return the folder of a new build whose commands are the stub."""

    def build(name: str, letter: str = "x", code: int = 0, says: str = "it") -> str:
        folder = tmp_path / name / "bin"
        folder.mkdir(parents=True)
        text = STUB.replace("LETTER", letter).replace("CODE", str(code)).replace("BUILD", says)
        for program in PROGRAMS:
            (folder / program).write_text(text)
            (folder / program).chmod(0o755)
        return str(folder)

    return build


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the script on CHAINS; return its exit code and what it printed."""
    monkeypatch.setattr(compare_builds, "all_chains", lambda: CHAINS)

    def call(*words: str) -> tuple[int, str]:
        code = compare_builds.main([*words, "--work", str(tmp_path / "work")])
        return code, capsys.readouterr().out

    return call


def test_times_and_speeds_are_no_difference(make: Make, run: Run) -> None:
    assert run(make("old"), make("new"), "--jobs", "2") == (0, "8 command lines, 8 alike, 0 differ\n")


def test_what_differs_is_named(make: Make, run: Run, tmp_path: Path) -> None:
    code, said = run(make("old"), make("new", letter="y", code=3, says="she"))
    assert code == 1
    assert said.endswith("\n8 command lines, 2 alike, 6 differ\n")
    for part in (
        "alike: quantize speak a.gguf\n    standard error\n      - 1: it says a.gguf\n      + 1: she says",
        "files: gguf-tools write o.gguf\n    o.gguf\n      - 1: sha256 ",
        "codes: NAME=value imatrix fail\n    exit code\n      - 1: 0\n      + 1: 3",
        "codes: imatrix both text.txt\n    text.txt\n      - 2: it\n      + 2: she",
    ):
        assert part in said


def test_a_recording_is_compared_with(make: Make, run: Run, tmp_path: Path) -> None:
    recording = str(tmp_path / "recording")
    (tmp_path / "recording" / "inputs").mkdir(parents=True)
    (tmp_path / "recording" / "inputs" / "mine").write_text("an input")
    assert run("record", make("old"), recording)[0] == 0
    new = make("new", code=3)
    assert run("compare", recording, new, "--only", "files") == (0, "3 command lines, 3 alike, 0 differ\n")
    code, said = run("compare", recording, new)
    assert (code, said.splitlines()[-1]) == (1, "8 command lines, 6 alike, 2 differ")

    wanted = tmp_path / "wanted.txt"
    wanted.write_text(
        "# why\ncodes: * imatrix fail -> 3 is clearer\ncodes: imatrix both * -> so it is here\n"
    )
    code, said = run("compare", recording, new, "--expected", str(wanted))
    assert code == 0
    assert "codes: * imatrix fail: 1 command lines: 3 is clearer" in said
    assert said.endswith("8 command lines, 6 alike, 0 differ, 2 differ as expected\n")

    wanted.write_text("codes: *\n")
    with pytest.raises(ValueError, match="line 1 is 'codes: \\*', expected PATTERN -> REASON"):
        run("compare", recording, new, "--expected", str(wanted))


def test_a_case_that_is_gone_is_a_difference(make: Make, run: Run, tmp_path: Path) -> None:
    recording = str(tmp_path / "recording")
    run("record", make("old"), recording)
    fewer = Chain("codes", CHAINS[2].lines[:1])
    CHAINS[2], whole = fewer, CHAINS[2]
    try:
        code, said = run("compare", recording, make("new"))
    finally:
        CHAINS[2] = whole
    assert code == 1
    assert (
        "codes: imatrix both text.txt\n    is recorded, and is a case now\n      - True\n      + False"
        in said
    )


def test_a_traceback_is_a_fault_though_it_is_recorded(make: Make, run: Run) -> None:
    says = "Traceback (most recent call last):\\nZeroDivisionError"
    code, said = run(make("old", says=says), make("new", says=says))
    assert code == 1
    assert "alike: quantize speak a.gguf\n    ends in a traceback\n" in said
    assert said.endswith("\n8 command lines, 7 alike, 1 differ\n")


def test_texts_are_changed_in_nothing_else() -> None:
    said = "wrote o.gguf in 1.1 s, 0.9 s of them for compiling kernels, once (20.78 MiB a second), 4.79 MiB"
    assert normal(said) == "wrote o.gguf in TIME (SPEED B a second), 4.79 MiB"
    assert normal('{"seconds": 0.25, "n": 12}') == '{"seconds": TIME, "n": 12}'
    assert normal("gguf-tools 0.1.0, 16.02 bits, 3 in 4") == "gguf-tools VERSION, 16.02 bits, 3 in 4"


def test_a_long_line_is_shown_where_it_differs() -> None:
    old, new = (Outcome("a: b", 0, "x" * 999 + letter, "") for letter in "yz")
    (found,) = differences(old, new)
    assert found.old == "1: ... " + "x" * 60 + "y"


def test_lines_apart_see_nothing_of_each_other(tmp_path: Path, make: Make) -> None:
    lines = "quantize write o.gguf \n quantize read o.gguf"
    build = Build(Path(make("old")), tmp_path / "work")
    (tmp_path / "inputs").mkdir()
    for apart, code in ((False, 0), (True, 1)):
        outcomes = run_chain(build, chain(f"apart-{apart}", lines, apart=apart), tmp_path / "inputs")
        assert [one.code for one in outcomes] == [0, code]


def test_a_part_of_a_set_brings_the_others() -> None:
    names = {f"in-0000{number}-of-00003.gguf" for number in (1, 2, 3)}
    assert chain("parts", "gguf-tools show in-00002-of-00003.gguf").mentions() >= names


def test_all_cases_are_commands_that_harm_nobody() -> None:
    chains = list(all_chains())
    assert len({one.name for one in chains}) == len(chains)
    for command in (command for one in chains for command in one.commands):
        assert command.words[0] in PROGRAMS
        assert not any(word.startswith(("/", "~", "..")) for word in command.words), command.line


def test_variables_stand_before_the_program() -> None:
    command = Command("PYTHONPATH=no-torch imatrix -m a=b 'two words'")
    assert command.variables == {"PYTHONPATH": "no-torch"}
    assert command.words == ("imatrix", "-m", "a=b", "two words")
