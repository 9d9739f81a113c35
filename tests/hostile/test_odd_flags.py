"""Odd values of flags and arguments: each ends in one line, and nothing is written or replaced.

The values are those that a script with a mistake passes on: an empty variable, the current folder, a number
of 23 digits, a pipe, a device. No test names a device as an output: if it failed, run as root, it would
replace the device. A pipe stands for all of them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import convert
import gguf_tools
import gguf_tools.commands.convert
import gguf_tools.commands.evaluate
import gguf_tools.commands.imatrix
import gguf_tools.commands.main
import gguf_tools.commands.quantize
import gguf_tools.commands.sensitivity
import imatrix
import quantize
from gguf_tools.errors import BadArgument, BadRequest, OutputError, ToolkitError
from gguf_tools.files.named_files import output_folder, output_path, output_prefix, read_input
from imatrix.forward.options import ForwardOptions
from quantize.mla_layout import change_layout
from tests.support.checkpoints import micro_checkpoint
from tests.support.tokenizer_files import copy_tokenizer
from tests.support.trained_model import calibration_text

pytest.importorskip("torch")

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "quantize": gguf_tools.commands.quantize.main,
    "convert-hf-to-gguf": gguf_tools.commands.convert.main,
    "imatrix": gguf_tools.commands.imatrix.main,
    "evaluate": gguf_tools.commands.evaluate.main,
    "sensitivity": gguf_tools.commands.sensitivity.main,
    "gguf-tools": gguf_tools.commands.main.main,
}
SECONDS = 60
"""A command that waits for a pipe is ended after this time."""

HUGE = "9" * 23
ENDLESS = "9" * 5000

TEXT = ["-f", "text.txt", "-c", "16", "--chunks", "2"]
OUTPUTS = {
    "quantize": ["quantize", "m.gguf", "OUT", "Q4_0"],
    "quantize --repack": ["quantize", "m.gguf", "OUT", "--repack"],
    "quantize --save-recipe": ["quantize", "m.gguf", "o.gguf", "--size", "5bpw", "--save-recipe", "OUT"],
    "quantize --curve": ["quantize", "m.gguf", "o.gguf", "--size", "5bpw", "--curve", "OUT"],
    "imatrix": ["imatrix", "-m", "m", *TEXT, "-o", "OUT"],
    "imatrix convert": ["imatrix", "convert", "x.dat", "OUT"],
    "imatrix merge": ["imatrix", "merge", "x.dat", "-o", "OUT"],
    "imatrix repair": ["imatrix", "repair", "x.dat", "-o", "OUT"],
    "imatrix stats --plot": ["imatrix", "stats", "x.dat", "--plot", "OUT"],
    "evaluate --json": ["evaluate", "m.gguf", "m.gguf", *TEXT, "--json", "OUT"],
    "evaluate --html": ["evaluate", "m.gguf", "m.gguf", *TEXT, "--html", "OUT"],
    "evaluate --kl-divergence-base": ["evaluate", "m.gguf", "m.gguf", *TEXT, "--kl-divergence-base", "OUT"],
    "sensitivity": ["sensitivity", "m", *TEXT, "-o", "OUT"],
    "set": ["gguf-tools", "set", "m.gguf", "general.name=x", "-o", "OUT"],
    "remove-key": ["gguf-tools", "remove-key", "m.gguf", "general.name", "-o", "OUT"],
    "rename": ["gguf-tools", "rename", "m.gguf", "output.weight=x", "-o", "OUT"],
    "merge": ["gguf-tools", "merge", "m.gguf", "OUT"],
    "mla-layout": ["gguf-tools", "mla-layout", "m.gguf", "OUT", "--to", "both"],
    "repack": ["gguf-tools", "repack", "m.gguf", "OUT"],
    "card": ["gguf-tools", "card", "m.gguf", "--force", "-o", "OUT"],
}
"""Command lines with the name of an output in the place of OUT."""

FOLDERS = {
    "convert-hf-to-gguf": ["convert-hf-to-gguf", "m", "--outfile", "OUT"],
    "cook": ["gguf-tools", "cook", "m", "-f", "text.txt", "--types", "Q8_0", "-o", "OUT"],
    "evaluate --keep": ["evaluate", "m.gguf", "m.gguf", *TEXT, "--keep", "OUT"],
    "evaluate --work": ["evaluate", "m.gguf", "m.gguf", *TEXT, "--work", "OUT"],
}
"""The same where a folder may be named."""

ODD_NAMES = {
    "": "names no file", ".": "names no file", "..": "names no file", "/": "names no file",
    "new/": "names no file", "m": "is a folder, expected a file", "pipe": "a pipe or a socket",
    "socket": "a pipe or a socket", "loop": "Too many levels of symbolic links",
    "m.gguf/o": "m.gguf is a file, expected a folder",
}  # fmt: skip

OTHERS = [
    (["quantize", "m.gguf", "o.gguf", "Q4_0", HUGE], "THREADS: '9+' is not a whole number from 1 to 10"),
    (["quantize", "m.gguf", "o.gguf", "Q4_0", ENDLESS], "THREADS: '9+'... is not a whole number"),
    (["quantize", "m.gguf", "o.gguf", "Q4_0", "0"], "THREADS: '0' is not"),
    (["quantize", "m.gguf", "o.gguf", "Q4_0", "--tensor-type-file", "pipe"], "pipe: not a regular file"),
    (["quantize", "m.gguf", "o.gguf", "--size", "5bpw", "--losses", "pipe"], "pipe: not a regular file"),
    (["quantize", "m.gguf", "o.gguf", "--size", "5bpw", "--losses", "deep.json"], "not a losses file"),
    (["quantize", "m.gguf", "o.gguf", "pipe.yaml"], r"pipe\.yaml: not a regular file"),
    (["quantize", "m.gguf", "o.gguf", "Q4_0", "--calibrate", "text.txt", "-c", "16", "--device", "meta"],
     "--device meta: torch can't use it"),
    (["imatrix", "-m", "m", *TEXT, "-o", "o.gguf", "--device", "meta"], "--device meta: torch can't use it"),
    (["imatrix", "-m", "m", *TEXT, "-o", "o.gguf", "--device", ""], "--device : torch can't use it"),
    (["imatrix", "-m", "m", *TEXT, "-o", "o.gguf", "-t", "100000"], "'100000' is not a whole number from 1"),
    (["imatrix", "-m", "m", *TEXT, "-o", "o.gguf", "-t", HUGE], "is not a whole number from 1 to 1024"),
    (["imatrix", "-m", "m", "-f", "pipe", "-o", "o.gguf"], "pipe: not a regular file"),
    (["imatrix", "-m", "m", "-f", "/dev/null", "-o", "o.gguf"], "/dev/null: not a regular file"),
    (["evaluate", "m", "m.gguf", *TEXT, "--device", "meta"], "--device meta: torch can't use it"),
    (["evaluate", "m", "m.gguf", *TEXT, "--html", "o.html", "--compare-with", "pipe"], "pipe: not a regular"),
    (["evaluate", "m", "m.gguf", *TEXT, "--html", "o.html", "--compare-with", "deep.json"],
     r"deep\.json: not a report of `evaluate --json`"),
    (["sensitivity", "m", *TEXT, "-o", "o.json", "--seed", HUGE], "is not a whole number from 0 to 9223372"),
    (["sensitivity", "m", *TEXT, "-o", "o.json", "-t", "100000"], "is not a whole number from 1 to 1024"),
    (["convert-hf-to-gguf", "m", "--outfile", "o.gguf", "--threads", HUGE], "is not a whole number from 1"),
    (["convert-hf-to-gguf", "m", "--outfile", "o.gguf", "--split-max-size", ENDLESS], "expected a number"),
    (["convert-hf-to-gguf", "m", "--outfile", "loop"], "Too many levels of symbolic links"),
    (["gguf-tools", "mla-layout", "m.gguf", "o.gguf", "--to", "both", "--threads", HUGE], "is not a whole"),
    (["gguf-tools", "repack", "m.gguf", "o.gguf", "--threads", HUGE], "is not a whole number from 1 to 1024"),
    (["gguf-tools", "split", "m.gguf", "o", "--max-size", f"{ENDLESS}M"], "is no size"),
    *((["gguf-tools", "split", "m.gguf", name], "names no file") for name in ("", ".", "..", "/", "new/")),
    (["gguf-tools", "split", "m.gguf", "o", "--max-tensors", ENDLESS], "is not a whole number from 1"),
    (["gguf-tools", "set", "m.gguf", "general.name=str@/dev/null"], "/dev/null: not a regular file"),
    (["gguf-tools", "set", "m.gguf", "general.name=str@pipe"], "pipe: not a regular file"),
    (["gguf-tools", "set", "", "general.name=x"], "is a folder, expected a file"),
    (["gguf-tools", "remove-key", "/", "general.name"], "/: is a folder, expected a file"),
    (["gguf-tools", "set", "loop", "general.name=x"], "Too many levels of symbolic links"),
    (["gguf-tools", "cook", "m", *TEXT, "--types", "Q8_0", "-o", "o", "--name", "\udcff"], "beginning of"),
    (["gguf-tools", "card", "m.gguf", "--report", "pipe"], "pipe: not a regular file"),
    (["evaluate", "m.gguf", "--kl-divergence-base", "pipe", "--kl-divergence"],
     "pipe: (is )?not a (regular file|file of logits)"),
    (["gguf-tools", "card", "m.gguf", "--report", "deep.json"], "not a report of `evaluate --json`"),
    (["evaluate", "m.gguf", "m.gguf", "-f", "t" * 5000], "File name too long"),
    (["quantize", "m.gguf", "o.gguf", "Q8_0", "--chunks=--"], "--chunks: expected a value, found '--'"),
]  # fmt: skip
"""Command lines, and what each of them says."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model in both forms."""
    parent = tmp_path_factory.mktemp("odd")
    copy_tokenizer("tiny", micro_checkpoint(parent / "m", "v3", vocab_size=4096, num_hidden_layers=2))
    convert.convert(parent / "m", parent / "m.gguf", outtype="f32")
    return parent


@pytest.fixture
def place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to run commands in, with the model, and things that are no files."""
    shutil.copytree(model / "m", tmp_path / "m", copy_function=os.link)
    shutil.copyfile(model / "m.gguf", tmp_path / "m.gguf")
    (tmp_path / "text.txt").write_bytes(calibration_text()[:3000])
    (tmp_path / "deep.json").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")

        def end(*_: object) -> None:
            raise TimeoutError(f"still running after {SECONDS} s")

        before = signal.signal(signal.SIGALRM, end)
        signal.alarm(SECONDS)
        yield tmp_path
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def kinds(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IFMT(path.lstat().st_mode) for path in folder.iterdir()}


def refused(words: Sequence[str], place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line of a command that is refused, and that leaves everything as it was."""
    before = kinds(place)
    code = COMMANDS[words[0]](words[1:])
    lines = capsys.readouterr().err.splitlines(keepends=True)
    err = "".join(line for line in lines if not line.startswith("warning: text.txt: the text is thin"))
    assert code in (1, 2), err
    assert err.count("\n") == 1, err
    assert len(err) < 6000
    assert kinds(place) == before
    return err


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("command", OUTPUTS)
def test_outputs_that_no_file_can_have(
    command: str, name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if (command, name) == ("evaluate --kl-divergence-base", "new/"):
        name = ""  # the flag may name an input, too, and is read as a path
    words = [name if word == "OUT" else word for word in OUTPUTS[command]]
    assert ODD_NAMES[name] in refused(words, place, capsys)


@pytest.mark.parametrize("name", ["", "pipe", "socket", "loop"])
@pytest.mark.parametrize("command", FOLDERS)
def test_folders_that_are_none(
    command: str, name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [name if word == "OUT" else word for word in FOLDERS[command]]
    assert "error: " in refused(words, place, capsys)


@pytest.mark.parametrize(("words", "complaint"), OTHERS, ids=[" ".join(words)[:70] for words, _ in OTHERS])
def test_values_that_make_no_sense(
    words: list[str], complaint: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(complaint, refused(words, place, capsys))


@pytest.mark.parametrize("name", ["", ".", "m", "pipe"])
@pytest.mark.parametrize(
    "call",
    [
        lambda name: quantize.quantize("m.gguf", name, "Q4_0"),
        lambda name: change_layout("m.gguf", name, "both"),
        lambda name: convert.convert("m", name) if name not in (".", "m") else output_path(name),
        lambda name: imatrix.collect("m", "text.txt", name),
        lambda name: gguf_tools.sensitivity("m", "text.txt", name),
    ],
    ids=["quantize", "change_layout", "convert", "collect", "sensitivity"],
)
def test_python_refuses_the_same_outputs(call: Callable[[str], object], name: str, place: Path) -> None:
    before = kinds(place)
    with pytest.raises(ToolkitError, match=r"names no file|is a folder|a pipe or a socket"):
        call(name)
    assert kinds(place) == before


@pytest.mark.parametrize("n_threads", [0, -1, 1025, 10**23])
def test_python_refuses_the_same_numbers_of_threads(n_threads: int) -> None:
    for options in (quantize.RunOptions, ForwardOptions):
        with pytest.raises(BadRequest, match=r"n_threads: found .*, expected a whole number from 1 to 1024"):
            options(n_threads=n_threads)


def test_names_of_files(place: Path) -> None:
    assert output_path("new.gguf") == Path("new.gguf")
    assert output_path(place / "m.gguf") == place / "m.gguf"
    assert output_path("m", may_be_folder=True) == Path("m")
    assert output_prefix("m") == Path("m"), "a folder may have the name that others begin with"
    assert output_folder("m") == Path("m")
    assert output_folder("new") == Path("new")
    with pytest.raises(BadArgument):
        output_folder("")
    with pytest.raises(OutputError, match=r"m\.gguf: is a file, expected a folder"):
        output_folder("m.gguf")
    with pytest.raises(BadRequest, match="3000 bytes, expected at most 2999"):
        read_input("text.txt", 2999)
