"""The trained model, converted: the file equals llama.cpp's, and computes what the original computes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from gguf_tools import Value, open_gguf
from tests.end_to_end.conftest import recorded_conversion
from tests.support import oracle
from tests.support.checkpoints import load_transformers

OUTTYPES = ["f32", "f16", "bf16", "q8_0"]

needs_llama_cpp = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")


@pytest.mark.parametrize("outtype", OUTTYPES)
def test_tensors_equal_llama_cpps_converter(outtype: str, tiny_gguf: Callable[[str], Path]) -> None:
    recorded = recorded_conversion(outtype)["tensors"]
    with open_gguf(tiny_gguf(outtype)) as file:
        assert list(file.tensors) == list(recorded)
        for name, (type_, ne, sha256) in recorded.items():
            info = file.tensors[name]
            assert [info.type.name, list(info.shape[::-1])] == [type_, ne], name
            assert hashlib.sha256(file.raw(name)).hexdigest() == sha256, name


def _summary(value: Value) -> Any:
    """Return a value as it is recorded: long arrays as length, first items and a hash."""
    plain = value.plain
    if not isinstance(plain, tuple):
        return plain
    text = json.dumps(list(plain), ensure_ascii=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"array_length": len(plain), "sha256_of_json": digest, "first": list(plain[:5])}


@pytest.mark.parametrize("outtype", OUTTYPES)
def test_metadata_equal_llama_cpps_converter(outtype: str, tiny_gguf: Callable[[str], Path]) -> None:
    with open_gguf(tiny_gguf(outtype)) as file:
        assert {key: _summary(value) for key, value in file.metadata.items()} == recorded_conversion(outtype)[
            "metadata"
        ]


@needs_llama_cpp
def test_llama_cpp_computes_what_transformers_computes(
    tiny_folder: Path, tiny_gguf: Callable[[str], Path]
) -> None:
    torch = pytest.importorskip("torch")
    text = "def mean(values):\n    return sum(values) / len(values)\n\n# 中文, 日本語 and 3.14159\n" * 3
    with oracle.Model(tiny_gguf("f32")) as model:
        ids = model.tokenize(text, add_special=True)
        found = model.logits(ids)
    with torch.no_grad():
        expected = load_transformers(tiny_folder)(torch.tensor([ids])).logits[0].numpy()
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) <= 1e-5


@needs_llama_cpp
@pytest.mark.parametrize("limits", [{"split_max_tensors": 20}, {"split_max_bytes": 5_000_000}])
def test_a_split_file_is_the_same_model(
    limits: dict[str, int], tiny_folder: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    result = convert.convert(tiny_folder, tmp_path / "split.gguf", outtype="bf16", **limits)
    assert len(result.paths) > 2
    with open_gguf(result.paths[1]) as split, open_gguf(tiny_gguf("bf16")) as whole:
        assert split.metadata == whole.metadata
        assert split.tensors == whole.tensors
        assert all((split.raw(name) == whole.raw(name)).all() for name in whole.tensors)
    with oracle.Model(result.paths[0]) as a, oracle.Model(tiny_gguf("bf16")) as b:
        assert (a.logits([0, 5, 6, 7]) == b.logits([0, 5, 6, 7])).all()


def test_big_endian_files_hold_the_same_numbers(
    tiny_folder: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    convert.convert(tiny_folder, tmp_path / "big.gguf", outtype="bf16", big_endian=True)
    with open_gguf(tmp_path / "big.gguf") as big, open_gguf(tiny_gguf("bf16")) as little:
        assert big.endian == "big"
        assert big.metadata == little.metadata
        for name, info in little.tensors.items():
            code = "u2" if info.type.name == "BF16" else "u4"
            assert (big.raw(name).view(f">{code}") == little.raw(name).view(f"<{code}")).all(), name


@needs_llama_cpp
def test_vocab_only(tiny_folder: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    result = convert.convert(tiny_folder, tmp_path, vocab_only=True)
    assert result.paths[0].name == "tiny-deepseek-v3-vocab.gguf"
    text = "Numbers 12345, 你好 and emoji 🙂\n\n    return None"
    with oracle.Model(result.paths[0], vocab_only=True) as vocab, oracle.Model(tiny_gguf("f32")) as model:
        assert vocab.tokenize(text) == model.tokenize(text)


def test_default_file_name_is_made_of_the_model(tiny_folder: Path, tmp_path: Path) -> None:
    result = convert.convert(tiny_folder, tmp_path, outtype="q8_0")
    assert result.paths == (tmp_path / "tiny-deepseek-16x5.7M-v3-Q8_0.gguf",)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_bytes_do_not_depend_on_threads(
    n_threads: int, tiny_folder: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    convert.convert(tiny_folder, tmp_path / "again.gguf", outtype="q8_0", n_threads=n_threads)
    assert (tmp_path / "again.gguf").read_bytes() == tiny_gguf("q8_0").read_bytes()
