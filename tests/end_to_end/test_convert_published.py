"""Published models without a recorded folder: the converted files are what llama.cpp's converter writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import convert
from gguf_tools import GGUFFile, open_gguf
from tests.end_to_end.arch_models import GOLDEN
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
    convert.convert(write(name, tmp_path / "model"), tmp_path / "out.gguf", outtype="bf16")
    with open_gguf(tmp_path / "out.gguf") as file:
        lines = list(described(file))
        assert keys(file) == RECORDED[name]["keys"]
    assert len(lines) == RECORDED[name]["n_tensors"]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == RECORDED[name]["sha256_of_tensors"]
