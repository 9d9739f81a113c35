"""The trained model, quantized: the bytes that llama-quantize writes, and files that llama.cpp runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import convert
import imatrix
import quantize
from gguf_tools import GGUFSet, open_gguf
from gguf_tools.errors import NeedsImportance
from quantize.fill.sources import GGUFTensor
from quantize.formats import available
from quantize.importances.entries import ImportanceFile
from tests.end_to_end.conftest import GOLDEN, recorded_quantization
from tests.support import oracle

WEIGHTED = recorded_quantization("f32.imatrix")
PLAIN = recorded_quantization("bf16.noimatrix")


def _types(recorded: dict) -> set[str]:
    return {entry[0] for entry in recorded.values()}


CAN_WRITE = [name for name, recorded in WEIGHTED.items() if _types(recorded) <= set(available())]
"""The recorded file types whose every type has a codec."""

OF_EVERY_KIND = ("Q4_0", "MXFP4_MOE", "IQ2_XS", "IQ1_M", "TQ1_0", "Q2_K", "IQ3_M", "IQ4_NL", "Q4_K_M", "Q8_0")
"""File types that have all kinds of blocks between them. The bytes of all types are compared with
llama-quantize's; what else their siblings do is tried with the slow tests."""

MOST_SLOWLY = [
    pytest.param(name, marks=() if name in OF_EVERY_KIND else pytest.mark.slow) for name in CAN_WRITE
]

FOR_OTHER_MODELS = ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "IQ1_S", "IQ1_M", "IQ2_XXS")
"""Types for models trained in them, and those too small for 11 million weights: they load and compute."""


@cache
def importances(form: str) -> ImportanceFile:
    return imatrix.load(GOLDEN / "imatrix" / f"tiny-deepseek-v3.imatrix.{form}")


def differing(file: GGUFSet, recorded: dict) -> list[str]:
    return [
        name
        for name, (type_, ne, sha256) in recorded.items()
        if file.tensors[name].type.name != type_
        or list(file.tensors[name].shape[::-1]) != ne
        or hashlib.sha256(file.raw(name)).hexdigest() != sha256
    ]


def test_every_recorded_file_type_is_compared() -> None:
    assert len(WEIGHTED) == 34
    assert set(CAN_WRITE) == set(WEIGHTED) == set(PLAIN)


@pytest.mark.parametrize("file_type", CAN_WRITE)
def test_with_importances(file_type: str, tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    quantize.quantize(tiny_gguf("f32"), tmp_path / "q.gguf", file_type, importances=importances("gguf"))
    with open_gguf(tmp_path / "q.gguf") as file:
        assert list(file.tensors) == list(WEIGHTED[file_type])
        assert differing(file, WEIGHTED[file_type]) == []


@pytest.mark.parametrize("file_type", CAN_WRITE)
def test_without_importances(file_type: str, tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    output = tmp_path / "q.gguf"
    if "refused" in PLAIN[file_type]:
        with pytest.raises(NeedsImportance, match=r"tensors need an importance matrix.*blk\.0\."):
            quantize.quantize(tiny_gguf("bf16"), output, file_type)
        assert list(tmp_path.iterdir()) == []
        return
    quantize.quantize(tiny_gguf("bf16"), output, file_type)
    with open_gguf(output) as file:
        assert list(file.tensors) == list(PLAIN[file_type])
        assert differing(file, PLAIN[file_type]) == []


@pytest.mark.parametrize("file_type", MOST_SLOWLY)
def test_with_importances_in_the_older_form(
    file_type: str, tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    """A `.dat` holds means times a number of calls. For experts that number is no power of two, so their
    weights differ from the GGUF form's in the last bit: those are compared with ggml, fed the same."""
    data = importances("dat")
    quantize.quantize(tiny_gguf("f32"), tmp_path / "q.gguf", file_type, importances=data)
    with open_gguf(tmp_path / "q.gguf") as file, open_gguf(tiny_gguf("f32")) as source:
        different = differing(file, WEIGHTED[file_type])
        assert all("_exps." in name for name in different)
        if oracle.available():
            for name in different:
                assert (file.raw(name) == _by_ggml(file, source, name, data)).all(), name


def _by_ggml(file: GGUFSet, source: GGUFSet, name: str, data: ImportanceFile) -> np.ndarray:
    info = file.tensors[name]
    rows = GGUFTensor(source, name).read_rows(0, info.n_rows).reshape(info.shape)
    weights = data.entries[name].weights().reshape(info.n_mats, info.n_cols)
    blocks = [oracle.quantize(info.type.id, m, w) for m, w in zip(rows, weights, strict=True)]
    return np.concatenate([block.reshape(-1) for block in blocks])


@cache
def logits_of(path: Path) -> np.ndarray:
    """Return what llama.cpp computes of a few tokens."""
    with oracle.Model(path) as model:
        return model.logits(list(range(40, 104)))


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
@pytest.mark.parametrize("file_type", MOST_SLOWLY)
def test_llama_cpp_runs_it(file_type: str, tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    quantize.quantize(tiny_gguf("f32"), tmp_path / "q.gguf", file_type, importances=importances("gguf"))
    logits, exact = logits_of(tmp_path / "q.gguf"), logits_of(tiny_gguf("f32"))
    assert np.isfinite(logits).all()
    if file_type not in FOR_OTHER_MODELS:
        assert np.linalg.norm(logits - exact) / np.linalg.norm(exact) < 0.6


@pytest.mark.parametrize("n_threads", [1, 3])
def test_bytes_do_not_depend_on_threads(
    n_threads: int, tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    for threads, name in ((2, "a.gguf"), (n_threads, "b.gguf")):
        quantize.quantize(
            tiny_gguf("bf16"), tmp_path / name, "Q4_K_M", importances=importances("gguf"), n_threads=threads
        )
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_every_layout_gives_a_head_the_same_blocks(
    tiny_folder: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    """attn_k_b and attn_v_b are weighted head by head, as one matrix each or as a matrix per head."""
    convert.convert(tiny_folder, tmp_path / "both.gguf", outtype="bf16", mla="both")
    for source, name in ((tmp_path / "both.gguf", "flat"), (tiny_gguf("bf16"), "heads")):
        quantize.quantize(source, tmp_path / f"{name}-q.gguf", "Q4_0", importances=importances("gguf"))
    with open_gguf(tmp_path / "flat-q.gguf") as flat, open_gguf(tmp_path / "heads-q.gguf") as heads:
        for name in (f"blk.{layer}.attn_{part}_b.weight" for layer in range(3) for part in "kv"):
            assert len(flat.tensors[name].shape) == 2
            assert (flat.raw(name) == heads.raw(name)).all(), name


def test_attn_k_b_gains_by_its_importances(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    """The error, weighted by each head's own activations, is smaller with importances than without."""
    data = importances("gguf")
    weights = data.entries["blk.1.attn_k_b.weight"].weights().reshape(4, 1, 128)
    errors = {}
    for label, known in (("with", data), ("without", None)):
        quantize.quantize(tiny_gguf("f32"), tmp_path / "q.gguf", "Q4_0", importances=known, force=True)
        with open_gguf(tmp_path / "q.gguf") as file, open_gguf(tiny_gguf("f32")) as source:
            found, exact = (
                GGUFTensor(f, "blk.1.attn_k_b.weight").read_rows(0, 1024).reshape(4, 256, 128)
                for f in (file, source)
            )
        errors[label] = float((weights * (found - exact) ** 2).sum())
    assert errors["with"] < 0.9 * errors["without"]
