"""Published models without a recorded folder: the converted files are what llama.cpp's converter writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import convert
from gguf_tools import GGUFFile, open_gguf
from gguf_tools.errors import CheckpointError, MissingTensor, UnexpectedTensors, UnsupportedCheckpoint
from imatrix.texts.tokens import make_encoder
from tests.end_to_end.arch_models import GOLDEN
from tests.imatrix.forward.hostile_text import HOSTILE
from tests.support import oracle
from tests.support.checkpoints import edit_config, edit_tensors, read_config, read_tensors
from tests.support.published_models import PUBLISHED, write

RECORDED: dict[str, Any] = json.loads((GOLDEN / "published.json").read_text(encoding="utf-8"))


def described(file: GGUFFile) -> Iterator[str]:
    """Yield a line for every tensor in file order: name, type, shape and a hash of the data."""
    for name, info in file.tensors.items():
        digest = hashlib.sha256(file.raw(name)).hexdigest()
        yield f"{name} {info.type.name} {'x'.join(map(str, info.shape))} {digest}"


def keys(file: GGUFFile) -> list[list[Any]]:
    """Return key, kind and value of all keys but those that are about the file; arrays as a hash."""
    listed = []
    for key, value in file.metadata.items():
        plain: Any = value.plain
        if key.startswith("general."):
            continue
        kind = value.kind.name
        if isinstance(plain, tuple):
            assert value.item is not None
            kind, text = f"{kind}[{value.item.name}]", json.dumps(plain, ensure_ascii=False)
            plain = hashlib.sha256(text.encode()).hexdigest()
        listed.append([key, kind, plain])
    return listed


@pytest.mark.parametrize("name", PUBLISHED)
def test_equals_llama_cpps_converter(name: str, tmp_path: Path) -> None:
    family = {"sentence_transformers_dense_modules": True} if PUBLISHED[name].dense else {}
    convert.convert(write(name, tmp_path / "model"), tmp_path / "out.gguf", outtype="bf16", family=family)
    with open_gguf(tmp_path / "out.gguf") as file:
        left_out = RECORDED[name].get("left_out", [])
        lines = [line for line in described(file) if line.split()[0] not in left_out]
        assert keys(file) == RECORDED[name]["keys"]
        assert all(file.tensors[each].type.name == "F32" for each in left_out)
    assert len(lines) == RECORDED[name]["n_tensors"]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == RECORDED[name]["sha256_of_tensors"]


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
def test_tokens_of_gemma_4_are_llama_cpps(tmp_path: Path) -> None:
    """Its tokenizer has pieces as SentencePiece has them, and merges."""
    folder = write("gemma-4", tmp_path / "model")
    convert.convert(folder, tmp_path / "out.gguf", outtype="bf16")
    with open_gguf(tmp_path / "out.gguf") as file:
        encoder = make_encoder(file.metadata)
    published = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with oracle.Model(tmp_path / "out.gguf", vocab_only=True) as model:
        for text in (*HOSTILE, "a value of <eos> and <|tool_call>"):
            ids = encoder.encode(text)
            assert ids == model.tokenize(text)
            if not {"<", "\n"} & set(text):
                assert ids == published.encode(text, add_special_tokens=False).ids


WITHOUT_SAMPLE = ("glm-4.6", "glm-5", "minimax-m2", "mistral", "youtu")
"""A model of each family that test_convert_arch_refusals.py has none of."""


def refused(folder: Path, error: type[CheckpointError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        convert.convert(folder, folder / "out.gguf")
    assert "\n" not in str(caught.value)
    assert not list(folder.glob("*.gguf*"))


@pytest.mark.parametrize("name", WITHOUT_SAMPLE)
def test_what_is_wrong_is_named_before_anything_is_written(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path / "model")
    whole = read_tensors(folder)
    output = "model.layers.1.self_attn.o_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.pop(output))
    refused(folder, MissingTensor, r"missing 1 tensor: model\.layers\.1\.self_attn\.o_proj\.weight")
    edit_tensors(
        folder, lambda tensors: tensors.update({output: whole[output], "model.extra.weight": whole[output]})
    )
    refused(folder, UnexpectedTensors, r"unexpected 1 tensor: model\.extra\.weight")
    edit_tensors(folder, lambda tensors: tensors.pop("model.extra.weight"))
    edit_tensors(folder, lambda tensors: tensors.update({output: whole[output][:-1]}))
    refused(
        folder, CheckpointError, r"o_proj\.weight: shape \(63, \d+\), expected \(64, \d+\) from config\.json"
    )
    edit_tensors(folder, lambda tensors: tensors.update({output: whole[output]}))
    config = read_config(folder)
    edit_config(folder, rope_scaling={"rope_type": "spiral", "factor": 2.0})
    refused(folder, UnsupportedCheckpoint, r"rope_scaling: RoPE of type 'spiral', expected")
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "tokenizer.json"
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"pre_tokenizer": byte_level}))
    refused(folder, CheckpointError, r"pre-tokenizer not recognised: found bytes")
