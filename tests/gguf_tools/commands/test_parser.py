"""Mistakes on the command line: one line, the nearest name, exit code 2."""

from __future__ import annotations

import argparse

import pytest

from gguf_tools.commands import command
from gguf_tools.commands.main import main
from gguf_tools.commands.parser import ForeignFlag, add_foreign_flags, did_you_mean

KNOWN = ["Q4_K_M", "Q4_K_S", "IQ4_XS", "--imatrix", "show", "--token-embedding-type"]


def parser() -> argparse.ArgumentParser:
    made = command.make_parser("prog", "d")
    made.add_argument("--imatrix")
    made.add_argument("--layout", choices=["split", "both"])
    commands = command.Subcommands(made)
    show = commands.add("show", lambda args: None, "print it", "Details.")
    show.add_argument("file")
    show.add_argument("--full", action="store_true")
    flags = (
        ForeignFlag(("-ngl",), "--device says where", 1, refused=False),
        ForeignFlag(("-fa", "--flash"), "it is exact", "?", refused=False),
        ForeignFlag(("--remote",), "download it first"),
        ForeignFlag(("--full-screen", "--imatrix-of"), "there is one window"),
    )
    add_foreign_flags(made, "other-prog", flags)
    return made


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--imatrx", "a", "show", "f"], "prog: error: unknown option --imatrx; did you mean --imatrix?"),
        (["--imatrx=a", "show", "f"], "prog: error: unknown option --imatrx; did you mean --imatrix?"),
        (["show", "f", "--ful"], None),  # argparse takes the beginning of a name for the name
        (["--imat", "m", "show", "f", "--full"], None),  # of ours alone
        (["show", "f", "--fulll"], "prog: error: unknown option --fulll; did you mean --full?"),
        (["show", "f", "--xyz"], "prog: error: unknown option --xyz"),
        (["shwo", "f"], "prog: error: argument COMMAND: invalid choice: 'shwo'; did you mean show?"),
        (["--layout", "bth", "show", "f"], "invalid choice: 'bth'; did you mean both?"),
        (["--layout", "x", "show", "f"], "invalid choice: 'x'; expected one of split, both"),
        (["show", "f", "g"], "prog: error: unexpected argument 'g'"),
        (["--remote", "show", "f"], "prog: error: --remote of other-prog: download it first"),
        ([], "prog: error: the following arguments are required: COMMAND"),
        (["show"], "prog show: error: the following arguments are required: file"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], line: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    code = command.run(parser(), lambda args: 0, argv)
    err = capsys.readouterr().err
    if line is None:
        assert (code, err) == (0, "")
        return
    assert code == 2
    assert line in err
    assert err.count("\n") == 1


def test_flags_that_change_nothing_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-ngl", "99", "-fa", "on", "--imatrix", "m", "show", "f"]
    seen: list[argparse.Namespace] = []
    assert command.run(parser(), seen.append, argv) == 0
    assert (seen[0].imatrix, seen[0].file) == ("m", "f")
    assert capsys.readouterr().err.splitlines() == [
        "prog: note: -ngl changes nothing: --device says where",
        "prog: note: -fa changes nothing: it is exact",
    ]


def test_flags_of_others_are_not_in_the_help() -> None:
    assert "-ngl" not in parser().format_help()


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("Q4_KM", "Q4_K_M"),
        ("q4-k-m", "Q4_K_M"),
        ("iq4xs", "IQ4_XS"),
        ("shwo", "show"),
        ("--embedding-type", "--token-embedding-type"),
        ("q4", "Q4_K_M or Q4_K_S"),
        ("model.gguf", None),
    ],
)
def test_nearest_name(word: str, near: str | None) -> None:
    assert did_you_mean(word, KNOWN) == ("" if near is None else f"; did you mean {near}?")


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        (["quantize", "--resume", "a", "b", "Q4_0"], "the same command resumes"),
        (["quantize", "--target-bpw", "3", "a", "b"], "say --size 3.4bpw"),
        (["quantize", "--bpw=3", "a", "b"], "say --size 3.4bpw"),
        (["quantize", "--output", "b", "a", "Q4_0"], "OUTPUT is the second word"),  # not --output-tensor-type
        (["quantize", "-o", "b", "a", "Q4_0"], "OUTPUT is the second word"),
        (["quantize", "-j", "4", "a", "b", "Q4_0"], "say -t N"),
        (["quantize", "--overwrite", "a", "b", "Q4_0"], "--force replaces existing outputs"),
        (["cook", "m", "--bits", "4"], "say --types 3.4bpw"),
        (["convert", "m", "--type", "q8_0"], "say --outtype Q4_K_M"),
        (["imatrix", "--num_threads", "4"], "say -t N"),
        (["sensitivity", "m", "--dataset", "t"], "say -f TEXT"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_words_of_other_tools_are_answered_with_ours(
    argv: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert f"; {answer}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("prog", ["evaluate m", "imatrix -m m", "sensitivity m", "cook m", "quantize"])
def test_a_second_text_is_not_taken_in_silence(prog: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = "--calibrate" if prog == "quantize" else "-f"
    assert main([*prog.split(), option, "a.txt", option, "b.txt"]) == 2
    assert f"{option} is given twice, a.txt and b.txt: name one" in capsys.readouterr().err
