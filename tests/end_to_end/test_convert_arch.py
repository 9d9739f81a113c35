"""Models of other architectures: the converted files equal llama.cpp's, tokenize alike, load and compute."""

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
from imatrix.texts.tokens import make_encoder
from tests.end_to_end.arch_models import CASES, GOLDEN, OWN_KEYS, model, recorded
from tests.support import oracle

needs_llama_cpp = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

YARN_BETA_FAST = {"kimi-k2": 1.0, "kimi-k2.5": 1.0}
"""Case -> what --yarn-beta-fast has to say for llama.cpp to compute the model."""

ALLOWED = {
    "glm-4.7-flash": 2e-5,  # latents are normed with the eps of the other norms
    "gpt-oss": 0.05,  # products of MXFP4 are computed on rounded activations
}
"""Case -> how far llama.cpp may be off, relative to the largest logit, where it computes something else."""

Converted = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Return the file of a case in an output type, made once."""
    folder = tmp_path_factory.mktemp("arch")

    def make(case: str, outtype: str) -> Path:
        path = folder / f"{case}-{outtype}.gguf"
        if not path.exists():
            convert.convert(model(case), path, outtype=outtype)
        return path

    return make


@pytest.mark.parametrize("outtype", ["bf16", "f32"])
@pytest.mark.parametrize("case", CASES)
def test_tensors_equal_llama_cpps_converter(case: str, outtype: str, converted: Converted) -> None:
    expected = recorded("convert", f"{case}.{outtype}")["tensors"]
    with open_gguf(converted(case, outtype)) as file:
        assert list(file.tensors) == list(expected)
        for name, (type_, ne, sha256) in expected.items():
            info = file.tensors[name]
            assert [info.type.name, list(info.shape[::-1])] == [type_, ne], name
            assert hashlib.sha256(file.raw(name)).hexdigest() == sha256, name


def summary(value: Value) -> tuple[str, Any]:
    """Return kind and value as they are recorded: arrays as length, first items and a hash."""
    plain = value.plain
    if not isinstance(plain, tuple):
        return value.kind.name, plain
    assert value.item is not None
    text = json.dumps(list(plain), ensure_ascii=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    brief = {"array_length": len(plain), "sha256_of_json": digest, "first": list(plain[:5])}
    return f"ARRAY[{value.item.name}]", brief


@pytest.mark.parametrize("case", CASES)
def test_keys_equal_llama_cpps_converter(case: str, converted: Converted) -> None:
    golden = recorded("convert", f"{case}.bf16")
    expected = {key: (golden["types"][key], value) for key, value in golden["metadata"].items()}
    with open_gguf(converted(case, "bf16")) as file:
        found = {key: summary(value) for key, value in file.metadata.items()}
    own = {key: value for key, (_, value) in found.items() if expected.get(key, (None, None))[1] != value}
    assert own == OWN_KEYS.get(case, {})
    common = {key: value for key, value in found.items() if key not in own}
    assert common == {key: value for key, value in expected.items() if key not in own}
    # Only general.file_type stands elsewhere.
    assert [key for key in common if key != "general.file_type"] == [
        key for key in expected if key in common and key != "general.file_type"
    ]


def recorded_ids(case: str) -> list[tuple[str, list[int]]]:
    """Return the recorded texts with their ids, without those that llama.cpp cuts otherwise."""
    golden = recorded("tokens", case)
    others = set(golden["texts where llama.cpp gives other ids"])
    return [(text, ids) for text, ids in golden["special tokens are parsed"] if text not in others]


@pytest.mark.parametrize("case", CASES)
def test_text_gets_the_recorded_ids(case: str, converted: Converted) -> None:
    with open_gguf(converted(case, "bf16")) as file:
        encoder = make_encoder(file.metadata, parse_special=True)
    for text, ids in recorded_ids(case):
        assert encoder.encode(text) == ids


@needs_llama_cpp
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_gives_text_the_recorded_ids(case: str, converted: Converted) -> None:
    with oracle.Model(converted(case, "bf16"), vocab_only=True) as vocab:
        for text, ids in recorded_ids(case):
            assert vocab.tokenize(text, parse_special=True) == ids


def recorded_logits(case: str) -> tuple[list[int], np.ndarray]:
    """Return token ids, and what transformers computes; llama.cpp where transformers has no such class."""
    with np.load(GOLDEN / "logits" / f"{case}.npz") as file:
        return file["ids"].tolist(), file.get("transformers", file["llama_cpp"])


@needs_llama_cpp
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_what_transformers_computes(case: str, converted: Converted) -> None:
    ids, expected = recorded_logits(case)
    with oracle.Model(converted(case, "f32")) as file:
        found = file.logits(ids, yarn_beta_fast=YARN_BETA_FAST.get(case))[-len(expected) :]
    assert np.abs(found - expected).max() / np.abs(expected).max() < ALLOWED.get(case, 1e-5)


@needs_llama_cpp
@pytest.mark.parametrize("case", CASES)
def test_a_quantized_file_loads_and_computes(case: str, tmp_path: Path) -> None:
    convert.convert(model(case), tmp_path / "q4.gguf", outtype="Q4_K_M")
    ids, _ = recorded_logits(case)
    with oracle.Model(tmp_path / "q4.gguf") as file:
        assert np.isfinite(file.logits(ids)).all()
