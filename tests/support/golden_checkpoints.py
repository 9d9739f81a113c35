"""The recorded quantized checkpoints of tests/golden/checkpoints: small folders made by each format's packer.

FORMAT.tar.xz holds FORMAT/CASE/ with config.json (and other files that the format's programs write beside
it), model.safetensors (or shards with an index), and expected.safetensors: all weights in float32 under their
logical names, and nothing else.
"""

from __future__ import annotations

import tarfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests.support.checkpoints import read_safetensors

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"


@cache
def _unpacked(format_: str) -> TemporaryDirectory[str]:
    folder = TemporaryDirectory(prefix="golden-checkpoints-")
    with tarfile.open(GOLDEN / f"{format_}.tar.xz") as archive:
        # Python 3.11.4 and newer ask how much an archive may do; this one is our own.
        how: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder.name, **how)
    return folder


def folder_of(format_: str, case: str) -> Path:
    """Return the folder of a recorded checkpoint. All tests share it, so none may change it."""
    return Path(_unpacked(format_).name) / format_ / case


def cases_in(format_: str) -> set[str]:
    """Return the names of the cases recorded for a format."""
    with tarfile.open(GOLDEN / f"{format_}.tar.xz") as archive:
        return {name.split("/")[1] for name in archive.getnames() if name.count("/") == 2}


@cache
def expected_weights(format_: str, case: str) -> dict[str, np.ndarray]:
    """Return the expected weights of a recorded checkpoint: logical name -> float32 array."""
    return read_safetensors(folder_of(format_, case) / "expected.safetensors")
