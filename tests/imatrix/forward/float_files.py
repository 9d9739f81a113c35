"""Files of float types made of a model, and a model whose weights BF16 can't hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

import convert
from tests.support.checkpoints import Tensors


def scale(tensors: Tensors) -> None:
    """Make weights that BF16 can't hold, for `edit_tensors`."""
    for name, values in tensors.items():
        tensors[name] = np.asarray(values, np.float32) * np.float32(1.01)


def files_of(model: Path, folder: Path, prefix: str = "") -> Callable[[str], Path]:
    """Return what gives the model's GGUF file of an output type, made once in `folder`.

    prefix  of its name, which is the type's
    """

    def make(outtype: str) -> Path:
        path = folder / f"{prefix}{outtype}.gguf"
        if not path.exists():
            convert.convert(model, path, outtype=outtype)
        return path

    return make
