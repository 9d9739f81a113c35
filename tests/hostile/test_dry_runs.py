"""What --dry-run promises holds with every other flag: nothing is written, and no weight is read.

The flags are those of the parsers, so that a new one is tried with all others. A pair may be refused. What
another option names, such as --curve PLOT.svg, is written.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import convert
import gguf_tools.commands.convert
import gguf_tools.commands.evaluate
import gguf_tools.commands.imatrix
import gguf_tools.commands.main
import gguf_tools.commands.quantize
import gguf_tools.commands.sensitivity
import imatrix
import quantize
from gguf_tools.commands.main import parsers
from gguf_tools.format.reader import GGUFFile
from gguf_tools.format.shards import GGUFSet
from quantize.importances.entries import Importance
from tests.support.checkpoints import micro_checkpoint
from tests.support.tokenizer_files import copy_tokenizer
from tests.support.trained_model import calibration_text

pytest.importorskip("torch")

MAINS: dict[str, Callable[[Sequence[str]], int]] = {
    "quantize": gguf_tools.commands.quantize.main,
    "convert-hf-to-gguf": gguf_tools.commands.convert.main,
    "gguf-tools": gguf_tools.commands.main.main,
    "evaluate": gguf_tools.commands.evaluate.main,
    "imatrix": gguf_tools.commands.imatrix.main,
    "sensitivity": gguf_tools.commands.sensitivity.main,
}

BASES = {
    "quantize": ["m.gguf", "o.gguf", "Q4_0"],
    "convert-hf-to-gguf": ["m", "--outfile", "o.gguf"],
    "gguf-tools set": ["m.gguf", "general.name=str:x"],
    "gguf-tools remove-key": ["m.gguf", "general.name"],
    "gguf-tools rename": ["m.gguf", "output.weight=x"],
    "gguf-tools split": ["m.gguf", "part"],
    "gguf-tools merge": ["m.gguf", "o.gguf"],
    "gguf-tools mla-layout": ["m.gguf", "o.gguf", "--to", "both"],
    "gguf-tools repack": ["m.gguf", "o.gguf"],
    "gguf-tools cook": ["m", "-f", "text.txt", "--types", "Q8_0", "-o", "o", "-c", "32", "--chunks", "2"],
    "gguf-tools upload": ["m.gguf", "me/nothing"],
    "evaluate": ["m.gguf", "q.gguf", "-f", "text.txt", "-c", "32", "--chunks", "2"],
    "imatrix": ["-m", "m", "-f", "text.txt", "-o", "o.gguf", "-c", "32", "--chunks", "2"],
    "sensitivity": ["m.gguf", "-f", "text.txt", "-o", "o.json", "-c", "32", "--chunks", "2"],
    "gguf-tools refine": [
        "q.gguf",
        "--base",
        "m.gguf",
        "-f",
        "text.txt",
        "-o",
        "o.gguf",
        "-c",
        "32",
        "--chunks",
        "2",
    ],
}
"""What each command with --dry-run is called with."""

VALUES = {
    "--calibrate": "text.txt", "--evaluate": "text.txt", "--sensitivity-text": "text.txt", "-f": "text.txt",
    "--imatrix": "x.imatrix", "--size": "5bpw", "--vram": "1GiB", "--ram": "1GiB", "--losses": "missing.json",
    "--reuse": "m.gguf", "--outtype": "q8_0", "--tensor-type": "ffn_down=Q8_0", "--pad": "256",
    "--report": "r.json",
    "--fallback": "attn=Q8_0", "--custom-q": "ffn_up=q8_0", "--output-tensor-type": "Q8_0",
    "--base-model": "me/x",
    "--token-embedding-type": "Q8_0", "--prune-layers": "1", "--override-kv": "general.name=str:x",
    "--repack-pattern": "ffn", "--device": "cpu", "--repository": "me/x", "--split-max-size": "1M",
    "--metadata": "facts.json", "--max-size": "1M", "--only": "ffn", "--outfile": "o.gguf", "--types": "Q8_0",
    "--include-weights": "ffn", "--exclude-weights": "ffn", "--tensor-type-file": "types.txt", "-o": "o",
    "--at-least": "ffn=Q4_K", "--at-most": "ffn=Q8_0", "--scheduler": "local:1", "--ctx-size": "32",
}  # fmt: skip
"""Values of options; others take the first of their choices, or 1."""

WRITTEN = ("--curve", "--save-recipe", "--save-tensor-types", "--save-custom-q", "--save-tensor-list")
LOOKING = ("--keep-grid",)
"""What looks at weights, as the help of --dry-run says."""


def flags_of(prog: str) -> Iterator[list[str]]:
    """Yield each option of a command with a value."""
    for action in parsers()[prog]._actions:
        name = action.option_strings[-1] if action.option_strings else ""
        is_other = type(action).__name__ in ("_ForeignAction", "_HelpAction", "_VersionAction")
        if not name or is_other or name == "--dry-run" or name in LOOKING:
            continue
        if action.nargs == 0:
            yield [name]
        elif isinstance(action, argparse._StoreAction | argparse._AppendAction) or action.metavar:
            value = next((VALUES[each] for each in action.option_strings if each in VALUES), None)
            yield [name, value or (str(next(iter(action.choices))) if action.choices else "1")]


def pairs_of(prog: str) -> list[tuple[list[str], list[str]]]:
    flags = [[], *flags_of(prog)]
    return [(a, b) for a, b in itertools.combinations(flags, 2) if a[:1] != b[:1]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("dry")
    copy_tokenizer("tiny", micro_checkpoint(parent / "m", "v3", vocab_size=4096, num_hidden_layers=2))
    convert.convert(parent / "m", parent / "m.gguf", outtype="f32")
    quantize.quantize(parent / "m.gguf", parent / "q.gguf", "Q4_0")
    with gguf_tools.open_gguf(parent / "m.gguf") as file:
        entries = {
            name: Importance(*_ones(info.n_cols))
            for name, info in file.tensors.items()
            if len(info.shape) == 2 and name.startswith("blk")
        }
    imatrix.save(parent / "x.imatrix", imatrix.ImportanceFile(entries))
    return parent


def _ones(n_cols: int) -> Any:
    import numpy as np

    return np.ones((1, n_cols), np.float32), np.ones(1, np.float32)


@pytest.fixture
def place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with inputs whose weights can't be read."""
    shutil.copytree(model / "m", tmp_path / "m", copy_function=os.link)
    for name in ("m.gguf", "q.gguf", "x.imatrix"):
        shutil.copyfile(model / name, tmp_path / name)
    (tmp_path / "text.txt").write_bytes(calibration_text()[:3000])
    (tmp_path / "types.txt").write_text("ffn_up=Q8_0")
    (tmp_path / "facts.json").write_text("{}")
    monkeypatch.chdir(tmp_path)

    def is_read(self: Any, *args: Any) -> Any:
        raise AssertionError("a weight is read")

    for class_ in (GGUFFile, GGUFSet):
        for name in ("raw", "blocks", "raw_rows"):
            monkeypatch.setattr(class_, name, is_read)
    monkeypatch.setattr(
        "convert.checkpoint.safetensors_file.SafetensorsFile.read_rows", is_read, raising=False
    )
    return tmp_path


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
        if not path.is_dir()
    }


def try_pair(prog: str, pair: Sequence[Sequence[str]], place: Path) -> None:
    words = prog.split()
    before = files(place)
    code = MAINS[words[0]]([*words[1:], "--dry-run", *BASES[prog], *pair[0], *pair[1]])
    assert code in (0, 1, 2), pair
    assert files(place) == before, pair


def test_every_command_with_dry_run_is_tried() -> None:
    aliases = {f"gguf-tools {name}" for name in ("convert", "quantize", "evaluate", "imatrix", "sensitivity")}
    known = {prog for prog, parser in parsers().items() if "--dry-run" in parser._option_string_actions}
    assert known - aliases == {*BASES}


@pytest.mark.parametrize("prog", BASES)
def test_some_pairs(prog: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = pairs_of(prog)
    for pair in random.Random(prog).sample(pairs, min(8, len(pairs))):
        try_pair(prog, pair, place)


@pytest.mark.slow
@pytest.mark.parametrize("prog", BASES)
def test_all_pairs(prog: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for pair in pairs_of(prog):
        try_pair(prog, pair, place)


def test_a_size_that_has_to_be_measured_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--sensitivity-text", "text.txt"], ["--calibrate", "text.txt"]):
        words = ["--dry-run", "--size", "5bpw", *more, "m.gguf", "o.gguf"]
        assert gguf_tools.commands.quantize.main(words) == 1
        assert "--dry-run computes nothing" in capsys.readouterr().err
