"""What needs no torch is refused before torch is loaded."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import convert
from tests.contract.import_graph import ROOT
from tests.support.checkpoints import micro_checkpoint
from tests.support.tokenizer_files import copy_tokenizer

CASES = [
    ["evaluate", "BASE", "m.gguf", "-f", "TEXT", "--json", "OUT"],
    ["evaluate", "BASE", "gone.gguf", "-f", "t.txt"],
    ["evaluate", "m.gguf", "m.gguf", "--suite", "nowhere"],
    ["evaluate", "m.gguf", "-f", "t.txt"],
    ["evaluate", "m.gguf", "--kl-divergence-base", "gone.kld", "--kl-divergence"],
    ["evaluate", "m.gguf", "m.gguf", "-f", "t.txt", "-c", "0"],
    ["imatrix", "-m", "BASE", "-f", "TEXT", "-o", "OUT"],
    ["sensitivity", "BASE", "-f", "TEXT", "-o", "OUT"],
    ["sensitivity", "m.gguf", "-f", "t.txt", "-o", "new", "--types", "AWQ"],
    ["quantize", "--calibrate", "TEXT", "gone.gguf", "new.gguf", "Q4_0"],
    ["quantize", "--calibrate", "gone.txt", "m.gguf", "new.gguf", "Q4_0"],
    ["quantize", "--size", "4bpw", "--sensitivity-text", "t.txt", "gone.gguf", "new.gguf"],
    ["gguf-tools", "refine", "m.gguf", "--base", "gone.gguf", "-f", "t.txt", "-o", "new"],
    ["gguf-tools", "refine", "m.gguf", "--base", "m.gguf", "-f", "gone.txt", "-o", "new"],
    ["gguf-tools", "refine", "m.gguf", "--base", "m.gguf", "-f", "t.txt", "-o", "no/new"],
    ["gguf-tools", "cook", "gone.gguf", "-f", "t.txt", "--types", "Q4_0", "-o", "new"],
    ["gguf-tools", "cook", "m.gguf", "-f", "latin.txt", "--types", "Q4_0", "-o", "new"],
    ["gguf-tools", "cook", "m.gguf", "-f", "t.txt", "--types", "AWQ", "-o", "new"],
    ["gguf-tools", "audit", "m.gguf", "m.gguf", "-f", "t.txt", "--json", "there"],
]

WAYS = [
    {"BASE": "gone.gguf", "TEXT": "t.txt", "OUT": "new"},
    {"BASE": "m.gguf", "TEXT": "gone.txt", "OUT": "new"},
    {"BASE": "m.gguf", "TEXT": "latin.txt", "OUT": "new"},
    {"BASE": "m.gguf", "TEXT": "t.txt", "OUT": "there"},
    {"BASE": "m.gguf", "TEXT": "t.txt", "OUT": "no/new"},
]  # fmt: skip
"""A missing model or text, a text in another encoding, an output that exists, and one without a folder."""

CODE = """
import importlib.util, io, json, sys, contextlib
class Refuse:
    def find_spec(self, name, *more):
        if name.partition(".")[0] == "torch":
            raise AssertionError("torch is imported")
sys.meta_path.insert(0, Refuse())
spec, found = importlib.util.find_spec, object()
importlib.util.find_spec = lambda name, *more: found if name == "torch" else spec(name, *more)
from gguf_tools.commands import convert, evaluate, imatrix, main, quantize, sensitivity
mains = {"gguf-tools": main.main, "evaluate": evaluate.main, "imatrix": imatrix.main,
         "quantize": quantize.main, "sensitivity": sensitivity.main}
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            code = mains[words[0]](words[1:])
    except AssertionError as error:
        code = str(error)
    if code not in (1, 2) or said.getvalue().count("error: ") != 1:
        print(" ".join(words), code, said.getvalue())
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="says that torch is missing")
def test_refusals_need_no_torch(tmp_path: Path) -> None:
    copy_tokenizer("tiny", micro_checkpoint(tmp_path / "m", "v3", vocab_size=4096, num_hidden_layers=1))
    convert.convert(tmp_path / "m", tmp_path / "m.gguf", outtype="f32")
    (tmp_path / "t.txt").write_text("words and more words " * 300)
    (tmp_path / "latin.txt").write_bytes("Größe und Gewicht ".encode("latin-1") * 300)
    (tmp_path / "there").write_text("mine")
    lines = [[way.get(word, word) for word in words] for words in CASES for way in WAYS]
    unlike = list(map(list, dict.fromkeys(map(tuple, lines))))
    command = [sys.executable, "-c", CODE, json.dumps(unlike)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
    assert (tmp_path / "there").read_text() == "mine"
