"""Streams that are closed, full or no longer read: the work is done, and the exit code tells of it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from gguf_tools.commands import command
from gguf_tools.text import has_terminal, say, say_aside
from tests.hostile.odd_names import COMMANDS, run, typed

pytest.importorskip("torch")


@contextmanager
def full() -> Iterator[TextIO]:
    yield open("/dev/full", "w")  # noqa: SIM115


@contextmanager
def unread() -> Iterator[TextIO]:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield open(writer, "w")  # noqa: SIM115


@contextmanager
def closed() -> Iterator[None]:
    """What Python makes of a stream that is closed when it starts."""
    yield None


@contextmanager
def closed_later() -> Iterator[TextIO]:
    """A stream that the caller of a command's `main` has closed."""
    with open("/dev/null", "w") as stream:
        pass
    yield stream


STATES = {"full": full, "unread": unread, "closed": closed, "closed later": closed_later}
QUICK = {"gguf-tools show", "imatrix merge", "quantize lint"}
LOST = {"full": 1, "unread": command.PIPE_CLOSED, "closed": 0, "closed later": 0}
"""Exit codes of a command whose answer is what it prints."""

PRINTING = {
    "quantize lint", "imatrix show", "imatrix stats", "gguf-tools show", "gguf-tools hash",
    "gguf-tools verify", "gguf-tools checkpoint", "gguf-tools upload",
}  # fmt: skip
"""Commands whose first words in COMMANDS end with 0, and make nothing."""


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "prog", [pytest.param(prog, marks=() if prog in QUICK else pytest.mark.slow) for prog in COMMANDS]
)
def test_lost_lines_stop_no_work(
    names: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], prog: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    words = COMMANDS[prog][0]
    (tmp_path / "usual").mkdir()
    usual = run(prog, typed(words, names, tmp_path / "usual"))
    capfd.readouterr()
    for name, stream in STATES.items():
        for out, err in ((True, False), (False, True), (True, True)):
            folder = tmp_path / f"{name}-{out}-{err}"
            folder.mkdir()
            with stream() as first, stream() as second, monkeypatch.context() as patch:
                if out:
                    patch.setattr(sys, "stdout", first)
                if err:
                    patch.setattr(sys, "stderr", second)
                code = run(prog, typed(words, names, folder))
                assert sys.stdout is first or not out
            expected = LOST[name] if out and prog in PRINTING else usual
            assert code == expected, (name, out, err)
            assert files(folder) == files(tmp_path / "usual")
            assert "Traceback" not in capfd.readouterr().err


RUN = "import sys; from gguf_tools.commands.{} import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("words", "shell", "code"),
    [
        (("main", "show", "{}"), ">&-", 0),
        (("quantize", "{}", "out.gguf", "Q8_0"), ">&- 2>&- <&-", 0),
        *(
            pytest.param(words, shell, code, marks=pytest.mark.slow)
            for words, shell, code in (
                (("main", "show", "{}"), ">&- 2>&-", 0),
                (("main", "show", "{}"), "> /dev/full", 1),
                (("main", "show", "{}"), "| true", 141),
                (("main", "show", "--help"), "> /dev/full", 1),
                (("main", "show", "{}.not"), "2>&-", 1),
                (("main", "show", "{}.not"), "2> /dev/full", 1),
                (("main", "hash", "{}"), "2>&1 | true", 141),
                (("quantize", "{}", "out.gguf", "Q8_0"), "> /dev/full 2>&1", 0),
                (("quantize", "{}", "out.gguf", "Q8_0"), "| true", 0),
                (("quantize", "{}", "out.gguf", "Q8_0", "--dry-run"), "| true", 141),
            )
        ),
    ],
)  # fmt: skip
def test_of_a_whole_process(
    names: dict[str, str], tmp_path: Path, words: tuple[str, ...], shell: str, code: int
) -> None:
    module, *typed_words = [word.replace("{}", names["GOOD"]) for word in words]
    # The second process of a pipe is gone before the first one writes.
    line = f'"$@" {shell}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", line, "bash", sys.executable, "-c", RUN.format(module), *typed_words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert done.stderr.count("\n") <= 1
    if "out.gguf" in words and code == 0:
        assert (tmp_path / "out.gguf").read_bytes()[:4] == b"GGUF"


def test_files_do_not_get_the_numbers_of_closed_streams(tmp_path: Path) -> None:
    """What a library or another process writes to standard output would end up in them."""
    code = (
        "import os, sys; from gguf_tools.commands import command\n"
        "def body(args):\n"
        "    file = open('kept', 'w'); os.write(1, b'C'); os.write(2, b'C'); file.write(str(file.fileno()))\n"
        "sys.exit(command.run(command.make_parser('prog', 'd'), body, []))\n"
    )
    line = '"$@" >&- 2>&- <&-'
    subprocess.run(
        ["bash", "-c", line, "bash", sys.executable, "-c", code],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()}, check=True,
    )  # fmt: skip
    assert int((tmp_path / "kept").read_text()) > 2


def test_no_more_open_files_end_in_one_line() -> None:
    code = (
        "import resource, sys; from gguf_tools.commands import command\n"
        "parser = command.make_parser('prog', 'd')\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "sys.exit(command.run(parser, lambda args: print(open(sys.executable)), []))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert os.strerror(errno.EMFILE) in done.stderr


def test_full_disk_is_told_in_one_line(
    names: dict[str, str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with full() as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert run("gguf-tools show", [names["GOOD"]]) == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert os.strerror(errno.ENOSPC) in error


@pytest.mark.parametrize("printing", [say, say_aside])
def test_library_prints_nowhere_without_streams(
    monkeypatch: pytest.MonkeyPatch, printing: Callable[[str], None]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    printing("a line")
    assert not has_terminal()


@pytest.mark.parametrize("stream", [full, unread])
def test_library_s_notes_are_not_missed(
    monkeypatch: pytest.MonkeyPatch, stream: Callable[[], AbstractContextManager[TextIO]]
) -> None:
    with stream() as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        say_aside("a line")
        os.dup2(os.open(os.devnull, os.O_WRONLY), stderr.fileno())  # what it holds is written at its end
