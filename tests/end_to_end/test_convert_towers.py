"""Vision towers: the files are those of llama.cpp's converter, byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from gguf_tools import GGUFFile, open_gguf
from tests.support.towers import NAMES, recorded, write

OUTTYPES = ("f16", "bf16", "f32", "q8_0", "auto")


def described(file: GGUFFile) -> Iterator[list[Any]]:
    """Yield what is recorded of each tensor, in file order."""
    for name, info in file.tensors.items():
        yield [name, info.type.name, list(info.shape), hashlib.sha256(file.raw(name)).hexdigest()[:12]]


def keys(file: GGUFFile) -> Iterator[list[Any]]:
    """Yield what is recorded of each key, in file order."""
    for key, value in file.metadata.items():
        kinds = value.kind.name if value.item is None else f"{value.kind.name} {value.item.name}"
        plain = list(value.plain) if isinstance(value.plain, tuple) else value.plain
        yield [key, kinds, plain]


def softplus_of(facts: dict[str, Any], path: Path) -> dict[str, bytes]:
    """Return the bytes of tensors that are computed -> those recorded, which differ by rounding."""
    replaced = {}
    with open_gguf(path) as file:
        for name, numbers in facts["softplus"].items():
            ours, theirs = file.raw(name).tobytes(), np.array(numbers, np.float32)
            steps = np.frombuffer(ours, np.int32) - theirs.view(np.int32)
            assert np.abs(steps).max() <= 2, name
            replaced[ours] = theirs.tobytes()
    return replaced


@pytest.mark.parametrize("name", NAMES)
def test_equals_llama_cpps_converter(name: str, tmp_path: Path) -> None:
    facts = recorded(name)
    folder, out = write(facts, tmp_path / name), tmp_path / "out.gguf"
    for outtype in OUTTYPES:
        convert.convert(folder, out, outtype=outtype, mmproj=True, force=True)
        data = out.read_bytes()
        for ours, theirs in softplus_of(facts, out).items():
            assert data.count(ours) == 1
            data = data.replace(ours, theirs)
        out.write_bytes(data)
        if outtype == "f16":
            with open_gguf(out) as file:
                assert list(keys(file)) == facts["keys"]
                assert list(described(file)) == facts["tensors"]
        assert (outtype, hashlib.sha256(data).hexdigest()) == (outtype, facts["sha256"][outtype])
