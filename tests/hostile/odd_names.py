"""Files whose names and contents would control a terminal, and every command with words that name them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import gguf_tools.commands.convert
import gguf_tools.commands.evaluate
import gguf_tools.commands.imatrix
import gguf_tools.commands.lint
import gguf_tools.commands.main
import gguf_tools.commands.quantize
import gguf_tools.commands.sensitivity
import imatrix
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.shards import FileLayout, open_gguf
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize.importances.entries import Importance, ImportanceFile

SMALL = Path(__file__).parents[2] / "examples" / "small-llama"
EVIL = "e\x1b[31m\x9b\nFORGED\r\t\x7f\u202e\u2066\u2028\u200b\u200f"
MAINS = {
    "quantize": gguf_tools.commands.quantize.main,
    "quantize lint": gguf_tools.commands.lint.main,
    "convert-hf-to-gguf": gguf_tools.commands.convert.main,
    "imatrix": gguf_tools.commands.imatrix.main,
    "evaluate": gguf_tools.commands.evaluate.main,
    "sensitivity": gguf_tools.commands.sensitivity.main,
    "gguf-tools": gguf_tools.commands.main.main,
}

TEXT = "-f TEXT -c 32 --chunks 1"
COMMANDS = {
    "convert-hf-to-gguf": ["HF --outfile OUT", "HF --outfile OUT --dry-run", "HF --outfile OUT --json"],
    "quantize": ["ODD OUT Q4_0", "GOOD OUT Q4_0 --card", "ODD OUT Q4_0 --dry-run", "ODD OUT Q4_0 --json"],
    "quantize lint": ["ODD Q4_K_M", "GOOD Q4_K_M", "ODD Q4_K_M --json", "GOOD EVIL"],
    "imatrix": [f"-m ODD {TEXT} -o OUT", f"-m GOOD {TEXT} -o OUT"],
    "imatrix show": ["MATRIX", "MATRIX --json", "ODD"],
    "imatrix convert": ["MATRIX OUT.dat", "MATRIX OUT", "ODD OUT"],
    "imatrix merge": ["MATRIX MATRIX -o OUT", "MATRIX ODD -o OUT"],
    "imatrix stats": ["MATRIX", "MATRIX --json", "MATRIX --plot OUT.svg"],
    "imatrix check": ["MATRIX --model ODD", "MATRIX --model GOOD --recipe Q4_K_M"],
    "imatrix repair": ["MATRIX -o OUT", "MATRIX -o OUT --model ODD"],
    "evaluate": [f"GOOD ODD {TEXT}", f"GOOD GOOD {TEXT} --html OUT.html --json OUT.json"],
    "sensitivity": [f"ODD {TEXT} -o OUT", f"GOOD {TEXT} -o OUT --types Q4_0"],
    "gguf-tools show": ["ODD --full", "GOOD", "ODD --json", "EVIL"],
    "gguf-tools diff": ["GOOD ODD --values", "GOOD ODD", "ODD GOOD --json"],
    "gguf-tools verify": ["ODD --against GOOD", "ODD", "ODD --json"],
    "gguf-tools hash": ["ODD", "ODD --json"],
    "gguf-tools scan": ["ODD", "ODD --data", "ODD --json"],
    "gguf-tools audit": ["ODD GOOD --html OUT.html", "GOOD HF"],
    "gguf-tools rederive": ["ODD --source GOOD", "GOOD --source ODD --sample 2 --json"],
    "gguf-tools attest": ["ODD --source GOOD -o OUT.json"],
    "gguf-tools refine": [f"ODD --base HF -o OUT {TEXT}", f"GOOD --base ODD -o OUT {TEXT}"],
    "gguf-tools set": ["COPY new.EVIL=str:EVIL", "COPY general.name=EVIL --dry-run", "COPY EVIL=i8:EVIL"],
    "gguf-tools remove-key": ["COPY EVIL", "COPY no.EVIL"],
    "gguf-tools rename": ["COPY EVIL=new.EVIL", "COPY --key EVIL=new.EVIL --json", "COPY EVIL=EVIL"],
    "gguf-tools split": ["ODD OUT --max-tensors 50", "ODD OUT --max-tensors 50 --json"],
    "gguf-tools merge": ["GOOD OUT"],
    "gguf-tools mla-layout": ["ODD OUT --to split"],
    "gguf-tools repack": ["ODD OUT", "ODD OUT --json"],
    "gguf-tools card": ["ODD -o OUT.md --quantized-by EVIL", "ODD -o OUT.md --force --base-model EVIL"],
    "gguf-tools cook": ["GOOD -f TEXT --types EVIL -o OUT", f"ODD --types Q4_0 -o OUT {TEXT}"],
    "gguf-tools upload": ["FOLDER me/x --dry-run", "FOLDER me/EVIL", "ODD me/x --dry-run"],
    "gguf-tools clean": ["FOLDER", "FOLDER --json", "FOLDER --remove"],
    "gguf-tools text": ["-o OUT", "-o FOLDER"],
    "gguf-tools checkpoint": ["HF", "HF --json", "GOOD"],
    "gguf-tools completion": ["EVIL", "bash"],
}  # fmt: skip
"""What each command is tried with, by its own name; all but the first are slow."""


def run(prog: str, words: Iterable[str]) -> int:
    """Run a command by its own name; return its exit code."""
    program, *rest = (prog,) if prog in MAINS else prog.split(maxsplit=1)
    return MAINS[program]([*rest, *words])


def typed(words: str, names: dict[str, str], folder: Path) -> list[str]:
    """Put names in place of the words in capitals; what is written or changed is in `folder`."""
    copy = Path(shutil.copy(names["ODD"], folder)) if "COPY" in words else folder
    known = {**names, "COPY": str(copy), "OUT": str(folder / f"out{EVIL}.gguf")}
    return [re.sub("|".join(known), lambda match: known[match[0]], word) for word in words.split()]


def write_odd(source: Path, path: Path, renamed: dict[str, str]) -> None:
    """Copy a GGUF file with odd keys and values, and other names of tensors."""
    with open_gguf(source) as file:
        infos = [
            TensorInfo(renamed.get(info.name, info.name), info.shape, info.type)
            for info in file.tensors.values()
        ]
        odd = {
            EVIL: Value.string(EVIL),
            "general.name": Value.string(EVIL),
            "general.tags": Value.strings([EVIL]),
        }
        layout = FileLayout.of({**file.metadata, **odd}, infos)
        with GGUFWriter(path, layout) as writer:
            for info, old in zip(infos, file.tensors, strict=True):
                writer.write(layout.offset_of(info.name), file.raw(old))
            writer.publish()


def odd_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands for the words in capitals in `COMMANDS`."""
    folder = tmp_path_factory.mktemp("odd") / EVIL
    folder.mkdir()
    plain = tmp_path_factory.mktemp("plain") / "plain.gguf"
    assert gguf_tools.commands.convert.main([str(SMALL), "--outfile", str(plain), "--quiet"]) == 0
    named = {
        "HF": f"hf{EVIL}", "GOOD": f"good{EVIL}.gguf", "ODD": f"odd{EVIL}.gguf", "TEXT": f"text{EVIL}",
        "MATRIX": f"matrix{EVIL}.gguf",
    }  # fmt: skip
    paths = {word: folder / name for word, name in named.items()}
    paths["HF"].symlink_to(SMALL)
    write_odd(plain, paths["GOOD"], {})
    write_odd(plain, paths["ODD"], {"blk.0.attn_q.weight": EVIL, "output.weight": f"o.{EVIL}"})
    paths["TEXT"].write_text("Some words, and some more of them. " * 60)
    seen = {f"blk.0.{EVIL}": Importance(np.ones((2, 256), np.float32), np.array([0, 1], np.float32))}
    imatrix.save(paths["MATRIX"], ImportanceFile(seen, (EVIL,), 1, 32))
    return {**{word: str(path) for word, path in paths.items()}, "FOLDER": str(folder), "EVIL": EVIL}
