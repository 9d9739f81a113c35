"""Nothing is lost: no output is written over an input, and no file beside an output unless we made it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gguf_tools.commands.convert import main as convert
from gguf_tools.commands.evaluate import main as evaluate
from gguf_tools.commands.imatrix import main as imatrix
from gguf_tools.commands.main import main as gguf_tools
from gguf_tools.commands.quantize import main as quantize
from gguf_tools.commands.sensitivity import main as sensitivity
from gguf_tools.errors import OutputError
from gguf_tools.files.named_files import small_partial, whole_file, write_whole
from gguf_tools.files.partial_file import GGUFWriter
from quantize.plan.sensitivities import write_sensitivities
from tests.gguf_tools.test_writer import LAYOUT
from tests.quantize.model_files import made_up_losses, write_mixture_model
from tests.support.checkpoints import micro_checkpoint
from tests.support.tokenizer_files import copy_tokenizer

Command = Callable[[Sequence[str]], int]

MODEL, LOSSES, TEXT = "model.gguf", "losses.json", "text.txt"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model, its losses and a text."""
    monkeypatch.chdir(tmp_path)
    write_mixture_model(tmp_path / MODEL)
    write_sensitivities(made_up_losses(), tmp_path / LOSSES)
    (tmp_path / TEXT).write_text("some words " * 500)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def refused(command: Command, words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which a command refuses its arguments."""
    assert command(words) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


SIZED = ("--size", "4bpw", "--losses", LOSSES, MODEL, "out.gguf")


@pytest.mark.parametrize("spelling", [MODEL, f"./{MODEL}", "link.gguf", "hard.gguf"])
@pytest.mark.parametrize(
    ("command", "words"),
    [
        *(
            (quantize, (*SIZED, option, "{}"))
            for option in (
                "--save-recipe", "--save-tensor-types", "--save-custom-q", "--save-tensor-list", "--curve",
            )
        ),
        (gguf_tools, ("card", MODEL, "-o", "{}", "--force")),
        (evaluate, (MODEL, MODEL, "-f", TEXT, "--json", "{}", "--force")),
        (evaluate, (MODEL, MODEL, "-f", TEXT, "--html", "{}", "--force")),
        (evaluate, (MODEL, MODEL, "-f", TEXT, "--kl-divergence-base", "{}", "--force")),
        (sensitivity, (MODEL, "-f", TEXT, "-o", "{}", "--force")),
        (imatrix, ("-m", MODEL, "-f", TEXT, "-o", "{}", "--force")),
        (imatrix, ("stats", MODEL, "--plot", "{}")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_no_output_replaces_an_input(
    folder: Path, capsys: pytest.CaptureFixture[str], command: Command, words: Sequence[str], spelling: str
) -> None:
    (folder / "link.gguf").symlink_to(MODEL)
    os.link(MODEL, "hard.gguf")
    before = content(folder)
    line = refused(command, [word.format(spelling) for word in words], capsys)
    assert f"{Path(spelling)}: is an input or another output of this command" in line
    assert content(folder) == before


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (quantize, (*SIZED, "--save-recipe", LOSSES)),
        (quantize, (*SIZED, "--save-recipe", "out.gguf")),
        (quantize, (*SIZED, "--save-recipe", "a", "--save-tensor-types", "a")),
        (evaluate, (MODEL, MODEL, "-f", TEXT, "--json", "a", "--html", "a")),
        (evaluate, ("checkpoint", MODEL, "-f", TEXT, "--keep", "checkpoint")),
        (evaluate, (MODEL, MODEL, "-f", TEXT, "--json", TEXT, "--force")),
        (imatrix, ("-m", "checkpoint", "-f", TEXT, "-o", "checkpoint/config.json", "--force")),
        (imatrix, ("-m", "p-00002-of-00003.gguf", "-f", TEXT, "-o", "p-00001-of-00003.gguf", "--force")),
    ],
)
def test_a_file_has_one_role(
    folder: Path, capsys: pytest.CaptureFixture[str], command: Command, words: Sequence[str]
) -> None:
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "config.json").write_text("{}")
    for number in (1, 2, 3):
        (folder / f"p-0000{number}-of-00003.gguf").write_bytes(b"GGUF")
    before = content(folder)
    assert "is an input or another output of this command" in refused(command, words, capsys)
    assert content(folder) == before


def test_text_replaces_no_model_that_was_not_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mixture_model(folder / "other.gguf")
    before = content(folder)
    line = refused(quantize, [*SIZED, "--dry-run", "--save-recipe", "other.gguf"], capsys)
    assert "other.gguf: is a GGUF file, and a text would replace it" in line
    assert content(folder) == before


def run_front(front: str, folder: Path) -> int:
    """Run a front whose output is out.gguf."""
    if front == "convert":
        checkpoint = micro_checkpoint(folder / "checkpoint", "v3", vocab_size=4096)
        copy_tokenizer("tiny", checkpoint)
        return convert([str(checkpoint), "--outfile", "out.gguf", "--outtype", "f32", "-q"])
    if front == "repack":
        assert quantize([MODEL, "plain.gguf", "Q4_0", "-q"]) == 0
    words = {
        "quantize": (quantize, [MODEL, "out.gguf", "Q4_0", "-q"]),
        "repack": (gguf_tools, ["repack", "plain.gguf", "out.gguf", "-q"]),
        "set": (gguf_tools, ["set", MODEL, "general.name=a longer name", "-o", "out.gguf"]),
    }
    command, arguments = words[front]
    return command(arguments)


@pytest.mark.parametrize("beside", ["out.gguf.journal", "out.gguf.partial"])
@pytest.mark.parametrize("how", ["somebody else's", "symbolic link", "hard link", "folder"])
@pytest.mark.parametrize("front", ["quantize", "convert", "repack", "set"])
def test_only_our_own_files_beside_an_output_are_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str], front: str, how: str, beside: str
) -> None:
    keep = folder / "keep"
    keep.write_bytes(b"hours of work")
    place = folder / beside
    if how == "somebody else's":
        place.write_bytes(b"hours of work")
    elif how == "symbolic link":
        place.symlink_to(keep)
    elif how == "hard link":
        os.link(keep, place)
    else:
        place.mkdir()
    assert run_front(front, folder) == 1
    assert beside in capsys.readouterr().err
    assert keep.read_bytes() == b"hours of work"
    assert place.is_dir() or place.read_bytes() == b"hours of work"
    assert not (folder / "out.gguf").exists()


def test_a_job_of_somebody_else_is_left_alone(folder: Path) -> None:
    (folder / "out.gguf.job").write_bytes(b"my job")
    assert run_front("quantize", folder) == 0
    assert (folder / "out.gguf.job").read_bytes() == b"my job"


def test_a_small_file_is_not_written_through_a_link(folder: Path) -> None:
    """README.md.partial was the fixed name under which a card grew."""
    (folder / "keep").write_text("mine")
    (folder / "README.md.partial").symlink_to("keep")
    assert gguf_tools(["card", MODEL]) == 0
    assert (folder / "keep").read_text() == "mine"
    assert (folder / "README.md.partial").is_symlink()


def test_a_killed_process_leaves_no_litter_for_good(tmp_path: Path) -> None:
    (tmp_path / small_partial("a")).write_text("of a killed process")
    others = {small_partial("b"), "a.1234abcd.partial", f"{small_partial('a')}.txt"}
    for name in others:
        (tmp_path / name).write_text("somebody else's, or of another file")
    with whole_file(tmp_path / "a") as file:
        file.write(b"first")
        write_whole(tmp_path / "a", b"second")  # meanwhile, by another process
        assert (tmp_path / "a").read_bytes() == b"second"
    assert (tmp_path / "a").read_bytes() == b"first"
    assert {path.name for path in tmp_path.iterdir()} == {"a", *others}


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="a pipe or a socket, expected a file"):
        write_whole(tmp_path / "pipe", b"numbers\n")
    with pytest.raises(OutputError, match="a pipe or a socket, expected a file"):
        GGUFWriter(tmp_path / "pipe", LAYOUT)
    assert (tmp_path / "pipe").is_fifo()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def fail() -> None:
        with whole_file(path) as file:
            file.write(b"new")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputError, match=r"can't be written \(No space left on device\)"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
