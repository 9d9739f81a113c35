"""safetensors files: the header, and every tensor read in every way."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

from convert.checkpoint.safetensors_file import SafetensorsFile
from gguf_tools.errors import ToolkitError
from tests.fuzz import mutate, scratch

HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]},
        "b.weight": {"dtype": "BF16", "shape": [2, 1, 4], "data_offsets": [24, 40]},
        "c": {"dtype": "F8_E4M3", "shape": [5], "data_offsets": [40, 45]},
        "d": {"dtype": "I64", "shape": [], "data_offsets": [45, 53]},
        "e": {"dtype": "F16", "shape": [0, 3], "data_offsets": [53, 53]},
        "f": {"dtype": "F4", "shape": [2, 3], "data_offsets": [53, 56]},
    }
)
DATA = bytes(range(56))


def make(rng: random.Random) -> bytes:
    """Return a valid file with a few changes."""
    header = mutate.json_bytes(rng, HEADER) if rng.random() < 0.9 else HEADER.encode()
    whole = (len(header).to_bytes(8, "little"), header, DATA)
    return b"".join(whole) if rng.random() < 0.7 else mutate.segments(rng, whole)


def warm_up() -> None:
    header = HEADER.encode()
    one_input(len(header).to_bytes(8, "little") + header + DATA)


def read(path: Path) -> None:
    """Open a file and read all of it; raises CheckpointError if it is refused."""
    with SafetensorsFile(path) as file:
        for tensor in file.tensors.values():
            with contextlib.suppress(ToolkitError):  # of a type that can't be read
                _use(tensor)


def _use(tensor: Any) -> None:
    tensor.read()
    tensor.read_rows(0, min(1, tensor.n_rows))
    tensor.read_columns(0, min(1, tensor.n_cols))
    tensor.read_elements(0, tensor.n_rows * tensor.n_cols)


def one_input(data: bytes) -> None:
    path = scratch.folder("safetensors") / "model.safetensors"
    path.write_bytes(data)
    read(path)
