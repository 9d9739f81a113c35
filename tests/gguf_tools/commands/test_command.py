"""How a command ends: exit codes and one-line errors."""

from __future__ import annotations

import argparse
import errno
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gguf_tools.argument_types import metric_bytes
from gguf_tools.choices import filled, flag
from gguf_tools.commands import command
from gguf_tools.errors import FormatError, ToolkitError

ROOT = Path(__file__).parents[3]


def end(body: Callable[[], int | None], *argv: str) -> int:
    parser = command.make_parser("prog", "d")
    return command.run(parser, lambda args: body(), argv)


def fail(error: BaseException) -> Callable[[], int | None]:
    def body() -> int | None:
        raise error

    return body


@pytest.mark.parametrize("code", [None, 0, 1, 3])
def test_code_of_the_body_is_the_exit_code(code: int | None) -> None:
    assert end(lambda: code) == (code or 0)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (FormatError("f: bad"), 1, "prog: error: f: bad\n"),
        (ToolkitError("two\nlines"), 1, "prog: error: two\\nlines\n"),
        (OSError(errno.ENOSPC, "No space left", "out"), 1, "prog: error: out: No space left\n"),
        (OSError(errno.EIO, "Input/output error"), 1, "prog: error: Input/output error\n"),
        (OSError("just text"), 1, "prog: error: just text\n"),
        (MemoryError(), 1, "prog: error: out of memory\n"),
        (KeyboardInterrupt(), 130, "prog: interrupted\n"),
    ],
)
def test_expected_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    assert end(fail(error)) == code
    assert capsys.readouterr().err == line
    assert end(fail(error), "--verbose") == code
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith(line)


def test_bugs_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        end(fail(ZeroDivisionError()))


def test_arguments_refused_by_the_body_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser("prog")
    assert command.run(parser, lambda args: parser.error("a and b contradict"), []) == 2
    assert "prog: error: a and b contradict" in capsys.readouterr().err


def test_reader_that_stops_reading_is_no_error() -> None:
    code = (
        "import sys; from gguf_tools.commands import command\n"
        "def body(args):\n"
        "    for i in range(100000): print('line', i)\n"
        "parser = command.make_parser('prog', 'd')\n"
        "parser.set_defaults(answers=True)\n"
        "sys.exit(command.run(parser, body, []))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == command.PIPE_CLOSED


def test_output_survives_an_encoding_that_lacks_the_text() -> None:
    code = (
        "from gguf_tools.commands import command\n"
        "command.run(command.make_parser('prog', 'd'), lambda args: print('\\u6df1'), [])\n"
    )
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, env=ascii_only, check=True
    )
    assert done.stdout == b"\\u6df1\n"


@dataclass(frozen=True)
class Options:
    fast: bool = flag(False, "hurry with {what}")
    careful: bool = flag(True, "no care", "--careless", "-x")
    size: int | None = flag(None, "how large", parse=metric_bytes, metavar="N(M|G)", words=["1G", "2G"])
    unseen: int = 3


def test_fields_of_options_become_flags() -> None:
    parser = argparse.ArgumentParser()
    command.add_flags(parser, Options, what="the work")
    assert filled(Options, parser.parse_args([])) == Options()
    words = ["--fast", "--careless", "--size", "3M"]
    assert filled(Options, parser.parse_args(words)) == Options(fast=True, careful=False, size=3_000_000)
    shown = parser.format_help()
    assert "hurry with the work" in shown
    assert "--size N(M|G)" in shown
    assert not hasattr(parser.parse_args([]), "unseen")


def test_some_fields_become_flags() -> None:
    parser = argparse.ArgumentParser()
    command.add_flags(parser, Options, only=["size"])
    assert vars(parser.parse_args([])) == {"size": None}
