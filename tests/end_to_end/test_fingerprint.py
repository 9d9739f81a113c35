"""The fingerprint of a run changes with everything that changes a byte of the output, and with nothing else.

The commands themselves are run, up to the journal that they would start.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import convert
import gguf_tools.commands.convert
import gguf_tools.commands.quantize
import imatrix
from gguf_tools.files.run_lock import first_difference
from gguf_tools.format.reader import GGUFFile
from quantize.fill import outputs, provenance
from quantize.importances.entries import Importance, ImportanceFile
from tests.support.checkpoints import edit_config, micro_checkpoint, shard
from tests.support.tokenizer_files import copy_tokenizer

About = Mapping[str, Any]
Edit = Callable[[Path], object]

CHOICES = "--imatrix MATRIX --tensor-type attn_output=Q5_1 --override-kv a.b=int:1 --prune-layers 1"
QUANTIZE = f"{CHOICES} IN OUT Q4_0"
CONVERT = "FOLDER --outfile OUT --outtype Q4_0 --imatrix MATRIX --model-name One"
PARTS = "--keep-split SPLIT OUT Q4_0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of 11 MB, its GGUF file, whole and in parts, and an importance matrix."""
    folder = tmp_path_factory.mktemp("made")
    model = micro_checkpoint(
        folder / "model", "v3", vocab_size=4096, hidden_size=384, moe_intermediate_size=64
    )
    copy_tokenizer("tiny", model)
    shard(model, 2)
    convert.convert(model, folder / "in.gguf", outtype="bf16")
    convert.convert(model, folder / "split.gguf", outtype="bf16", split_max_tensors=30)
    with GGUFFile(folder / "in.gguf") as file:
        entries = {
            info.name: Importance(
                np.full((info.n_mats, info.n_cols), 3, np.float32), np.full(info.n_mats, 3, np.float32)
            )
            for info in file.tensors.values()
            if len(info.shape) > 1 and "blk" in info.name
        }
    imatrix.save(folder / "matrix.gguf", ImportanceFile(entries, ("text",), 1, 512))
    return folder


@pytest.fixture
def inputs(made: Path, tmp_path: Path) -> Path:
    """A copy of `made`, for a test to change."""
    return shutil.copytree(made, tmp_path / "inputs")


class Begun(Exception):
    """Stops a run, and carries its fingerprint."""

    def __init__(self, about: About) -> None:
        self.about = about


Fingerprint = Callable[[Path, str], About]


@pytest.fixture
def about(monkeypatch: pytest.MonkeyPatch) -> Fingerprint:
    """Return a function that returns the fingerprint of a command line in a folder like `made`."""

    def begin(path: Path, about: About, *, restart: bool = False, state: bytes = b"") -> NoReturn:
        raise Begun(json.loads(json.dumps(about)))

    monkeypatch.setattr(outputs, "Journal", begin)

    def fingerprint_of(folder: Path, words: str) -> About:
        places = {
            "IN": folder / "in.gguf",
            "SPLIT": folder / "split-00001-of-00002.gguf",
            "FOLDER": folder / "model",
            "MATRIX": folder / "matrix.gguf",
            "OUT": folder / "out.gguf",
        }
        main = gguf_tools.commands.convert.main if "--outfile" in words else gguf_tools.commands.quantize.main
        with pytest.raises(Begun) as begun:
            main([str(places.get(word, word)) for word in words.split()])
        return begun.value.about

    return fingerprint_of


@pytest.mark.parametrize(
    ("base", "changed", "difference"),
    [
        (QUANTIZE, QUANTIZE.replace("Q4_0", "Q4_1"), "type of, token_embd.weight"),
        (QUANTIZE, QUANTIZE.replace("Q5_1", "Q8_0"), "type of, blk.0.attn_output.weight"),
        (QUANTIZE, f"--output-tensor-type Q5_0 {QUANTIZE}", "type of, output.weight"),
        (QUANTIZE, f"--token-embedding-type Q8_0 {QUANTIZE}", "type of, token_embd.weight"),
        (QUANTIZE, f"--leave-output-tensor {QUANTIZE}", "type of, output.weight"),
        (QUANTIZE, f"--exclude-weights attn_q_a {QUANTIZE}", "importances of, blk.0.attn_q_a.weight"),
        (QUANTIZE, QUANTIZE.replace("a.b=int:1", "a.b=int:2"), "metadata, a.b"),
        (QUANTIZE, QUANTIZE.replace("a.b=int:1", "a.b=float:1"), "metadata, a.b"),
        (QUANTIZE, QUANTIZE.replace("a.b=int", "a.c=int"), "metadata, a.c"),
        (QUANTIZE, QUANTIZE.replace("layers 1", "layers 2"), "source of, blk.1.attn_k_b.weight"),
        (QUANTIZE, QUANTIZE.replace("layers 1", "layers 1,2"), "type of, blk.1.attn_k_b.weight"),
        (PARTS, PARTS.replace("--keep-split", ""), "metadata, split.no"),
        (CONVERT, CONVERT.replace("Q4_0", "Q4_1"), "type of, token_embd.weight"),
        (CONVERT, "FOLDER --outfile OUT --outtype q8_0", "type of, token_embd.weight"),
        (CONVERT, f"{CONVERT} --tensor-type attn_output=Q8_0", "type of, blk.0.attn_output.weight"),
        (CONVERT, f"{CONVERT} --mla both", "type of, blk.0.attn_kv_b.weight"),
        (CONVERT, CONVERT.replace("One", "Two"), "metadata, general.name"),
        (CONVERT, f"{CONVERT} --bigendian", "output, out.gguf"),
        (CONVERT, f"{CONVERT} --split-max-tensors 30", "metadata, split.no"),
        (CONVERT, f"{CONVERT} --exclude-weights attn_q_a", "importances of, blk.0.attn_q_a.weight"),
    ],
)
def test_a_choice_changes_it(
    about: Fingerprint, made: Path, base: str, changed: str, difference: str
) -> None:
    found = first_difference(about(made, base), about(made, changed))
    assert found is not None
    assert found[0] == difference, found


def flip(where: float) -> Edit:
    """Return a function that changes one byte of a file: the last byte of this share of it."""

    def edit(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(where * len(data)) - 1] ^= 1
        path.write_bytes(data)

    return edit


def zeros(where: float) -> Edit:
    """Return a function that fills a file with zeros from this share of it on, for a tenth of it."""

    def edit(path: Path) -> None:
        data = bytearray(path.read_bytes())
        start, n_bytes = int(where * len(data)), len(data) // 10
        data[start : start + n_bytes] = bytes(n_bytes)
        path.write_bytes(data)

    return edit


def edit_matrix(edit: Callable[[Importance], Importance]) -> Edit:
    def apply(path: Path) -> None:
        found = imatrix.load(path)
        name = "blk.2.ffn_down_exps.weight"
        edited = replace(found, entries={**found.entries, name: edit(found.entries[name])})
        imatrix.save(path, edited, force=True)

    return apply


def one_value(entry: Importance) -> Importance:
    values = entry.values.copy()
    values[-1, -1] += 1
    return Importance(values, entry.counts)


def one_count(entry: Importance) -> Importance:
    counts = entry.counts.copy()
    counts[-1] += 1
    return Importance(entry.values, counts)


@pytest.mark.parametrize(
    ("words", "file", "edit", "difference"),
    [
        (QUANTIZE, "in.gguf", flip(0.003), "source, in.gguf, start"),
        (QUANTIZE, "in.gguf", zeros(0.03), "source, in.gguf"),
        (QUANTIZE, "in.gguf", zeros(0.5), "source, in.gguf"),
        (QUANTIZE, "in.gguf", flip(1), "source, in.gguf"),
        (PARTS, "split-00002-of-00002.gguf", flip(1), "source, split-00002-of-00002.gguf"),
        (QUANTIZE, "matrix.gguf", edit_matrix(one_value), "importances of, blk.1.ffn_down_exps.weight"),
        (QUANTIZE, "matrix.gguf", edit_matrix(one_count), "importances of, blk.1.ffn_down_exps.weight"),
        (
            CONVERT,
            "model/model-00001-of-00002.safetensors",
            zeros(0.5),
            "source, model-00001-of-00002.safetensors",
        ),
        (
            CONVERT,
            "model/model-00002-of-00002.safetensors",
            flip(1),
            "source, model-00002-of-00002.safetensors",
        ),
        (CONVERT, "matrix.gguf", edit_matrix(one_value), "importances of, blk.2.ffn_down_exps.weight"),
        (
            CONVERT,
            "model",
            lambda folder: edit_config(folder, rms_norm_eps=1e-5),
            "metadata, deepseek2.attention.layer_norm_rms_epsilon",
        ),
    ],
)
def test_an_input_changes_it(
    about: Fingerprint, inputs: Path, words: str, file: str, edit: Edit, difference: str
) -> None:
    before = about(inputs, words)
    edit(inputs / file)
    found = first_difference(before, about(inputs, words))
    assert found is not None
    assert found[0] == difference or found[0].startswith(f"{difference}, tensors, "), found


def test_metadata_are_told_with_their_kind(about: Fingerprint, made: Path) -> None:
    before = about(made, QUANTIZE)["metadata"]
    assert before["a.b"] == "1 (UINT32)"
    assert before["general.architecture"] == "'deepseek2' (STRING)"
    assert len(before["tokenizer.ggml.tokens"]) == 32  # a digest


@pytest.mark.parametrize(
    ("where", "name"), [("CHUNK_ELEMS", "elements of a chunk"), ("BYTES_VERSION", "version of the bytes")]
)
def test_a_version_changes_it(
    about: Fingerprint, made: Path, monkeypatch: pytest.MonkeyPatch, where: str, name: str
) -> None:
    before = about(made, QUANTIZE)
    monkeypatch.setattr(provenance, where, 7)
    place, _, new = first_difference(before, about(made, QUANTIZE)) or ("", None, None)
    assert (place, new) == (name, 7)


@pytest.mark.parametrize("words", [QUANTIZE, CONVERT, PARTS])
def test_what_changes_no_byte_does_not_change_it(about: Fingerprint, inputs: Path, words: str) -> None:
    before = about(inputs, words)
    for path in inputs.rglob("*"):
        os.utime(path, (1, 1))
    threads = f"{words} --threads 1" if words is CONVERT else f"{words} 1"
    assert about(inputs, threads) == before
    elsewhere = shutil.copytree(inputs, inputs.parent / "elsewhere")
    assert about(elsewhere, words) == before
